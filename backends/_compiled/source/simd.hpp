// Vectors of as many floats as a processor's registers hold, in the compilers' own extension of the language: the same
// text for AVX-512, AVX2, SSE and NEON.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>

namespace {

#if defined(__AVX512F__)
constexpr int LANES = 16;
#elif defined(__AVX2__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif

typedef float Vec __attribute__((vector_size(LANES * 4)));
typedef float Loose __attribute__((vector_size(LANES * 4), aligned(4)));  // anywhere in memory
typedef std::int32_t Ints __attribute__((vector_size(LANES * 4)));
typedef std::uint32_t Words __attribute__((vector_size(LANES * 4)));
typedef std::uint32_t LooseWords __attribute__((vector_size(LANES * 4), aligned(4)));

constexpr float INF = std::numeric_limits<float>::infinity();
constexpr float NEGLIGIBLE = -70.0f;  // relskew_core._array.softmax

inline Ints load_ints(const std::int32_t *p) {
    return reinterpret_cast<Ints>(*reinterpret_cast<const LooseWords *>(p));
}
inline Vec load(const float *p) { return *reinterpret_cast<const Loose *>(p); }
inline void store(float *p, Vec x) { *reinterpret_cast<Loose *>(p) = x; }
inline Vec splat(float x) { return x - Vec{}; }
inline Vec larger(Vec a, Vec b) { return a > b ? a : b; }

// e^x of x <= 88: exactly 0 below e^-70, NaN of NaN. Cephes' polynomial, 2 ulp.
inline Vec exponential(Vec x) {
    Vec held = x < -88.0f ? splat(-88.0f) : x;
    Vec shifted = held * 1.44269504f + 12582912.0f;  // the nearest integer, in the last bits
    Vec n = shifted - 12582912.0f;
    Vec r = held - n * 0.693359375f + n * 2.12194440e-4f;
    Vec p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r + 1.0f;
    Ints power = (reinterpret_cast<Ints>(shifted) - 0x4B400000 + 127) << 23;
    Vec result = p * reinterpret_cast<Vec>(power);
    return x < NEGLIGIBLE ? Vec{} : result;
}

inline Vec hyperbolic_tangent(Vec x) {
    Vec size = x < 0.0f ? -x : x;
    Vec held = size > 10.0f ? splat(10.0f) : size;
    Vec far = 1.0f - 2.0f / (exponential(2.0f * held) + 1.0f);
    Vec s = x * x;
    Vec near = size * (1.0f + s * (-0.333333333f + s * (0.133333333f + s * (-0.0539682540f + s * 0.0218694885f))));
    Vec result = size < 0.25f ? near : far;
    return x < 0.0f ? -result : result;
}

// Lanes of two vectors, by their numbers: those of the second one go on from the first one's.
#if defined(__clang__)
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else  // before its version 12, GCC does not have the same
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, Ints{__VA_ARGS__})
#endif

// Lanes of two vectors in turn, from lane n on; the lanes of one from lane n on, and around.
#if defined(__AVX512F__)
#define IN_TURN(n) \
    n, n + 16, n + 1, n + 17, n + 2, n + 18, n + 3, n + 19, n + 4, n + 20, n + 5, n + 21, n + 6, n + 22, n + 7, n + 23
#define FROM(n) \
    n, n + 1, n + 2, n + 3, n + 4, n + 5, n + 6, n + 7, n + 8, n + 9, n + 10, n + 11, n + 12, n + 13, n + 14, n + 15
#elif defined(__AVX2__)
#define IN_TURN(n) n, n + 8, n + 1, n + 9, n + 2, n + 10, n + 3, n + 11
#define FROM(n) n, n + 1, n + 2, n + 3, n + 4, n + 5, n + 6, n + 7
#else
#define IN_TURN(n) n, n + 4, n + 1, n + 5
#define FROM(n) n, n + 1, n + 2, n + 3
#endif

inline Vec low_in_turn(Vec a, Vec b) { return SHUFFLE(a, b, IN_TURN(0)); }
inline Vec high_in_turn(Vec a, Vec b) { return SHUFFLE(a, b, IN_TURN(LANES / 2)); }

template <int N = LANES / 2>
inline Vec sum_in_all(Vec x) {
    if constexpr (N > 0) return sum_in_all<N / 2>(x + SHUFFLE(x, x, FROM(N)));
    return x;
}

template <int N = LANES / 2>
inline Vec largest_in_all(Vec x) {
    if constexpr (N > 0) return largest_in_all<N / 2>(larger(x, SHUFFLE(x, x, FROM(N))));
    return x;
}

inline float sum(Vec x) { return sum_in_all(x)[0]; }
inline float largest(Vec x) { return largest_in_all(x)[0]; }

// What is made of the numbers of the lanes.
#if defined(__AVX512F__)
#define LANE_BY_LANE(f) \
    f(0), f(1), f(2), f(3), f(4), f(5), f(6), f(7), f(8), f(9), f(10), f(11), f(12), f(13), f(14), f(15)
#elif defined(__AVX2__)
#define LANE_BY_LANE(f) f(0), f(1), f(2), f(3), f(4), f(5), f(6), f(7)
#else
#define LANE_BY_LANE(f) f(0), f(1), f(2), f(3)
#endif
#define SAME(n) n
#define OWN(n) (n & STEP ? n + LANES : n)
#define ACROSS(n) (n & STEP ? (n ^ STEP) + LANES : n ^ STEP)
inline Ints numbers() { return Ints{LANE_BY_LANE(SAME)}; }

// Add the halves of two vectors that have the bit STEP in their lanes' numbers, and those that do not: b's and a's.
template <int STEP>
inline Vec sum_of_halves(Vec a, Vec b) {
    return SHUFFLE(a, b, LANE_BY_LANE(OWN)) + SHUFFLE(a, b, LANE_BY_LANE(ACROSS));
}

// Return the sum of each of LANES vectors, in their order.
template <int STEP = LANES / 2>
inline Vec sums(Vec *x) {
    if constexpr (STEP > 0) {
        for (int i = 0; i < STEP; i++) x[i] = sum_of_halves<STEP>(x[i], x[i + STEP]);
        return sums<STEP / 2>(x);
    }
    return x[0];
}

// Make columns of LANES rows.
inline void transpose(Vec *x) {
    for (int step = LANES; step > 1; step /= 2) {
        Vec y[LANES];
        for (int i = 0; i < LANES / 2; i++) {
            y[2 * i] = low_in_turn(x[i], x[i + LANES / 2]);
            y[2 * i + 1] = high_in_turn(x[i], x[i + LANES / 2]);
        }
        for (int i = 0; i < LANES; i++) x[i] = y[i];
    }
}

}  // namespace
