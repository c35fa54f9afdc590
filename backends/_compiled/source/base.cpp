#define LEVEL base
#include "level.hpp"
