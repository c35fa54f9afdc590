// The tile registers of Intel's AMX, which multiply matrices of pairs of bfloat16: 12 rows by 16 pairs, and 16 pairs by
// 16 columns. As assembly, since compilers' own names for the instructions differ, and older ones have none.
#pragma once

#include "problem.hpp"
#include "simd.hpp"

namespace {

#if defined(AMX)
constexpr bool TILES = PAIRS;
#else
constexpr bool TILES = false;
#endif
constexpr Index TILE_PAIRS = 16;  // of a tile: the depth of one multiplication

#if defined(AMX)
constexpr int TILE_ROWS = 12;  // of the left factor and of sums
constexpr int LEFT = 4;
#endif

#if defined(AMX) && defined(EMULATED)  // by the tests, in C++
#include "tiles_in_software.hpp"
#elif defined(AMX)
// Reserve the registers for products: 0 to 3 hold sums, LEFT the left factor, and those after it the right one. Other
// code may have changed them between tasks.
inline void configure_tiles() {
    struct alignas(64) {
        std::uint8_t palette = 1, start = 0, reserved[14] = {};
        std::uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
        std::uint8_t rows[16] = {TILE_ROWS, TILE_ROWS,  TILE_ROWS,  TILE_ROWS,
                                 TILE_ROWS, TILE_PAIRS, TILE_PAIRS, TILE_PAIRS};
    } static const config;
    asm volatile("ldtilecfg %0" ::"m"(config));
}

inline void release_tiles() { asm volatile("tilerelease"); }

template <int TILE>
inline void clear_tile() {
    asm volatile("tilezero %%tmm%c0" ::"i"(TILE));
}

// The rows of a tile are `step` bytes apart.
template <int TILE>
inline void load_tile(const void *from, Index step) {
    asm volatile("tileloadd (%1,%2,1), %%tmm%c0" ::"i"(TILE), "r"(from), "r"(step) : "memory");
}

template <int TILE>
inline void store_tile(void *to, Index step) {
    asm volatile("tilestored %%tmm%c0, (%1,%2,1)" ::"i"(TILE), "r"(to), "r"(step) : "memory");
}

// Add the product of the left factor and the right one in tile RIGHT to the sums in tile TO.
template <int TO, int RIGHT>
inline void multiply_tiles() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(TO), "i"(LEFT), "i"(RIGHT));
}
#else
inline void configure_tiles() {}
inline void release_tiles() {}
#endif

}  // namespace
