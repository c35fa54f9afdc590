#include "few.hpp"

namespace v3 {
bool attend(const Problem &x, Index part, Index parts) { return ::attend(x, part, parts); }
}  // namespace v3
