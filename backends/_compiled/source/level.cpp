// The kernels for one kind of processor and one dtype of arrays; setup.py compiles this file for each LEVEL and STORED.
#include "backward.hpp"
#include "few.hpp"

namespace LEVEL {

EXPORTED bool attend(const Problem &x, Tasks &tasks) { return is_few(x) ? attend_few(x, tasks) : forward(x, tasks); }

EXPORTED bool pull_back(const Problem &x, Tasks &tasks) { return backward(x, tasks); }

}  // namespace LEVEL
