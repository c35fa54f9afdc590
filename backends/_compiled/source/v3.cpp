#define LEVEL v3
#include "level.hpp"
