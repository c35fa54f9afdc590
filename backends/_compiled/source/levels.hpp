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
#elif defined(WITH_v8_bf16)
#include <sys/auxv.h>
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
#elif defined(WITH_v8_bf16)
namespace v8_bf16 {
DECLARE_FOR(BFloat16)
}
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
#elif defined(WITH_v8_bf16)
    {"armv8 with bfloat16",
     {PASSES(base, float), PASSES(base, double), PASSES(base, Float16), PASSES(v8_bf16, BFloat16)}},
#endif
};

#if defined(__x86_64__)
// What `cpuid` answers to a number: zeros, if this processor has no such number.
struct Answer {
    unsigned a = 0, b = 0, c = 0, d = 0;
    explicit Answer(unsigned number, unsigned part = 0) { __get_cpuid_count(number, part, &a, &b, &c, &d); }
};

bool has(unsigned found, unsigned bits) { return (found & bits) == bits; }

// The kinds of registers that the system keeps for each thread, as bits. macOS keeps those of AVX-512 from their first
// use on.
unsigned kept_registers() {
    unsigned kinds = 0;
    if (has(Answer(1).c, bit_OSXSAVE)) asm("xgetbv" : "=a"(kinds) : "c"(0) : "edx");
#if defined(__APPLE__)
    kinds |= 0xE0;
#endif
    return kinds;
}
#endif

#if defined(__x86_64__) && defined(__linux__)
// Whether there are tile registers that multiply bfloat16, and Linux lets this process use them: it must be asked.
bool may_use_tiles() {
    constexpr unsigned TILES = 1u << 24 | 1u << 22;
    constexpr long ASK = 0x1023, TILE_DATA = 18;  // ARCH_REQ_XCOMP_PERM, and the number of the registers' contents
    return has(Answer(7).d, TILES) && !syscall(SYS_arch_prctl, ASK, TILE_DATA);
}
#endif

// Without the compilers' own functions for it, which Microsoft's libraries lack.
void look_at_processor() {
#if defined(__x86_64__)
    constexpr unsigned OF_AVX = 0x6, OF_AVX512 = 0xE6;
    const Answer wide(7);
    const unsigned kept = kept_registers();
    levels[1].supported = has(kept, OF_AVX) && has(Answer(1).c, bit_AVX | bit_F16C | bit_FMA) && has(wide.b, bit_AVX2);
    levels[2].supported = levels[1].supported && has(kept, OF_AVX512) &&
                          has(wide.b, bit_AVX512F | bit_AVX512DQ | bit_AVX512BW | bit_AVX512VL);
    const bool pairs = levels[2].supported && has(Answer(7, 1).a, bit_AVX512BF16);
    levels[3].supported = pairs && Answer(0).b != signature_INTEL_ebx;  // whose vectors are nearly twice as fast
#if defined(__linux__)
    levels[4].supported = pairs && may_use_tiles();
#endif
#elif defined(WITH_v8_bf16)
    levels[1].supported = getauxval(AT_HWCAP2) & HWCAP2_BF16;
#endif
    const auto own = [](const Level &level) { return level.of<BFloat16>().attend; };
    for (Level *level = levels + 1; level != std::end(levels); level++)
        level->here = level->supported && own(*level) != own(level[-1]);
}

}  // namespace
