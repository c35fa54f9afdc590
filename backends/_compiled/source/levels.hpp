// The compiled kernels of each kind of processor and each dtype, and which of them this processor supports.
#pragma once

#include <tuple>

#include "tasks.hpp"

#if defined(LEVELS_OF_X86_64)
#include <cpuid.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#endif

#define DECLARE_FOR(STORED)                          \
    bool attend(const ProblemOf<STORED> &, Tasks &); \
    bool pull_back(const ProblemOf<STORED> &, Tasks &);
#define DECLARE(LEVEL)    \
    namespace LEVEL {     \
    DECLARE_FOR(float)    \
    DECLARE_FOR(double)   \
    DECLARE_FOR(Float16)  \
    DECLARE_FOR(BFloat16) \
    }
DECLARE(base)
#if defined(LEVELS_OF_X86_64)
DECLARE(v3)
DECLARE(v4)
namespace v4_bf16 {
DECLARE_FOR(BFloat16)
}
#if defined(__linux__)
namespace v4_amx {
DECLARE_FOR(BFloat16)
}
#endif
#endif

namespace {

// The kernels of both passes, for one dtype.
template <class Stored>
struct Passes {
    Kernel<Stored> attend, pull_back;
};

// The compiled levels in ascending order, and whether this processor supports them.
struct Level {
    const char *name;
    std::tuple<Passes<float>, Passes<double>, Passes<Float16>, Passes<BFloat16>> passes;
    bool here = true;

    template <class Stored>
    const Passes<Stored> &of() const {
        return std::get<Passes<Stored>>(passes);
    }
};

#define PASSES(LEVEL, STORED) \
    Passes<STORED> { LEVEL::attend, LEVEL::pull_back }
#define ALL_PASSES(LEVEL) {PASSES(LEVEL, float), PASSES(LEVEL, double), PASSES(LEVEL, Float16), PASSES(LEVEL, BFloat16)}
Level levels[] = {
    {"base", ALL_PASSES(base)},
#if defined(LEVELS_OF_X86_64)
    {"x86-64-v3", ALL_PASSES(v3)},
    {"x86-64-v4", ALL_PASSES(v4)},
    {"x86-64-v4 with bfloat16",
     {PASSES(v4, float), PASSES(v4, double), PASSES(v4, Float16), PASSES(v4_bf16, BFloat16)}},
#if defined(__linux__)
    {"x86-64-v4 with bfloat16 tiles",
     {PASSES(v4, float), PASSES(v4, double), PASSES(v4, Float16), PASSES(v4_amx, BFloat16)}},
#endif
#endif
};

#if defined(LEVELS_OF_X86_64) && defined(__linux__)
// Whether there are tile registers that multiply bfloat16, and Linux lets this process use them: it must be asked.
bool may_use_tiles() {
    constexpr unsigned TILES = 1u << 24 | 1u << 22;
    constexpr long ASK = 0x1023, TILE_DATA = 18;  // ARCH_REQ_XCOMP_PERM, and the number of the registers' contents
    unsigned a, b, c, features = 0;
    return __get_cpuid_count(7, 0, &a, &b, &c, &features) && (features & TILES) == TILES &&
           !syscall(SYS_arch_prctl, ASK, TILE_DATA);
}
#endif

void look_at_processor() {
#if defined(LEVELS_OF_X86_64)
    __builtin_cpu_init();        // static initializers may run before the compiler's own
    unsigned a, b, features, d;  // GCC 10 and Clang 16 have no name for f16c, so its bit is read
    const bool halves = __get_cpuid(1, &a, &b, &features, &d) && (features & bit_F16C);
    levels[1].here = halves && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    levels[2].here = levels[1].here && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
                     __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl");
    const bool pairs = levels[2].here && __builtin_cpu_supports("avx512bf16");
    levels[3].here = pairs && !__builtin_cpu_is("intel");  // its vectors multiply floats nearly twice as fast
#if defined(__linux__)
    levels[4].here = pairs && may_use_tiles();
#endif
#endif
}

}  // namespace
