// The kernels for one kind of processors and one dtype: compiled once for each LEVEL and each REAL, see setup.py.
#include "backward.hpp"
#include "few.hpp"

namespace LEVEL {

bool attend(const Problem &x, Index part, Index parts) {
    return x.queries <= FEW && !x.k_positions && !x.k_segments ? attend_few(x, part, parts) : forward(x, part, parts);
}

bool pull_back(const Problem &x, Index part, Index parts) { return backward(x, part, parts); }

}  // namespace LEVEL
