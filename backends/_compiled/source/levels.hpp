// The compiled kernels of each kind of processor and each dtype, and which of them this processor supports.
#pragma once

#include <iterator>
#include <tuple>

#include "tasks.hpp"

#if defined(__x86_64__)
#include <cpuid.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#endif

#define DECLARE_FOR(STORED)                                   \
    EXPORTED bool attend(const ProblemOf<STORED> &, Tasks &); \
    EXPORTED bool pull_back(const ProblemOf<STORED> &, Tasks &);
#define DECLARE(LEVEL)    \
    namespace LEVEL {     \
    DECLARE_FOR(float)    \
    DECLARE_FOR(double)   \
    DECLARE_FOR(Float16)  \
    DECLARE_FOR(BFloat16) \
    }
DECLARE(base)
#if defined(__x86_64__)  // a level that is not compiled has the kernels of the one before it
#if defined(WITH_v3)
DECLARE(v3)
#else
namespace v3 = base;
#endif
#if defined(WITH_v4)
DECLARE(v4)
#else
namespace v4 = v3;
#endif
#if defined(WITH_v4_bf16)
namespace v4_bf16 {
DECLARE_FOR(BFloat16)
}
#else
namespace v4_bf16 = v4;
#endif
#if defined(WITH_v4_amx)
namespace v4_amx {
DECLARE_FOR(BFloat16)
}
#else
namespace v4_amx = v4_bf16;
#endif
#endif

namespace {

// The kernels of both passes, for one dtype.
template <class Stored>
struct Passes {
    Kernel<Stored> attend, pull_back;
};

// The levels in ascending order, whether this processor supports them, and whether they are compiled as well.
struct Level {
    const char *name;
    std::tuple<Passes<float>, Passes<double>, Passes<Float16>, Passes<BFloat16>> passes;
    bool supported = true, here = true;

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
#if defined(__x86_64__)
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

#if defined(__x86_64__) && defined(__linux__)
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
#if defined(__x86_64__)
    __builtin_cpu_init();        // static initializers may run before the compiler's own
    unsigned a, b, features, d;  // GCC 10 and Clang 16 have no name for f16c, so its bit is read
    const bool halves = __get_cpuid(1, &a, &b, &features, &d) && (features & bit_F16C);
    levels[1].supported = halves && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    levels[2].supported = levels[1].supported && __builtin_cpu_supports("avx512f") &&
                          __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512bw") &&
                          __builtin_cpu_supports("avx512vl");
    const bool pairs = levels[2].supported && __builtin_cpu_supports("avx512bf16");
    levels[3].supported = pairs && !__builtin_cpu_is("intel");  // its vectors multiply floats nearly twice as fast
#if defined(__linux__)
    levels[4].supported = pairs && may_use_tiles();
#endif
    const auto own = [](const Level &level) { return level.of<BFloat16>().attend; };
    for (Level *level = levels + 1; level != std::end(levels); level++)
        level->here = level->supported && own(*level) != own(level[-1]);
#endif
}

}  // namespace
