#include "few.hpp"

namespace v4 {
bool attend(const Problem &x, Index part, Index parts) { return ::attend(x, part, parts); }
}  // namespace v4
