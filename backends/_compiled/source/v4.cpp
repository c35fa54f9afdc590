#define LEVEL v4
#include "level.hpp"
