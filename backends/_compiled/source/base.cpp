#include "few.hpp"

namespace base {
bool attend(const Problem &x, Index part, Index parts) { return ::attend(x, part, parts); }
}  // namespace base
