// Vectors as long as a processor's registers, in the vector extension of the compilers: the same code for AVX-512,
// AVX2, SSE and NEON, and for float and double.
#pragma once

#include <cfloat>
#include <cmath>
#include <limits>
#include <type_traits>
#include <utility>

#include "half.hpp"

#if defined(__F16C__)  // every processor with AVX2 has it
#include <immintrin.h>
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#include <arm_neon.h>
#endif

#if FLT_EVAL_METHOD != 0 && FLT_EVAL_METHOD != 16  // 16: float16 alone is computed as it is stored
#error "`exponential` rounds to an integer by adding a large number, and needs sums that are no wider than their type"
#endif

namespace {

using Stored = STORED;  // the type of arrays' entries, for which level.cpp is compiled
using Real = typename Computed<Stored>::Real;
constexpr bool DOUBLE = sizeof(Real) == 8;
constexpr bool CONVERTED = !std::is_same_v<Stored, Real>;  // whether entries are converted before computing with them

#if defined(__AVX512F__) || defined(EMULATED)
constexpr int REGISTER = 64;  // bytes
#elif defined(__AVX2__)
constexpr int REGISTER = 32;
#else
constexpr int REGISTER = 16;
#endif
constexpr int LANES = REGISTER / sizeof(Real);

typedef Real Vec __attribute__((vector_size(REGISTER)));
typedef Real Loose __attribute__((vector_size(REGISTER), aligned(sizeof(Real))));  // at any address
typedef std::conditional_t<DOUBLE, std::int64_t, std::int32_t> Ints __attribute__((vector_size(REGISTER)));
typedef std::conditional_t<DOUBLE, std::uint64_t, std::uint32_t> Bits __attribute__((vector_size(REGISTER)));
typedef std::int32_t Labels32 __attribute__((vector_size(LANES * 4)));  // as many 32-bit integers
typedef std::uint32_t Words __attribute__((vector_size(LANES * 4)));
typedef std::uint32_t LooseWords __attribute__((vector_size(LANES * 4), aligned(4)));
typedef std::uint16_t LooseHalves __attribute__((vector_size(LANES * 2), aligned(2)));
typedef std::int8_t LooseBytes __attribute__((vector_size(LANES), aligned(1)));

// The processor multiplies pairs of bfloat16, and adds both products to a float; in tests, C++ does.
#if defined(__AVX512BF16__) || defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC) || defined(EMULATED)
constexpr bool PAIRS = std::is_same_v<Stored, BFloat16>;
#else
constexpr bool PAIRS = false;
#endif

constexpr Real INF = std::numeric_limits<Real>::infinity();
constexpr Real NEGLIGIBLE = -70;  // relskew_core._array.softmax

inline Words load_words(const std::int32_t *p) { return *reinterpret_cast<const LooseWords *>(p); }
inline Ints widened(Words x) { return __builtin_convertvector(reinterpret_cast<Labels32>(x), Ints); }
inline Ints load_ints(const std::int32_t *p) { return widened(load_words(p)); }
inline Vec load(const Real *p) { return *reinterpret_cast<const Loose *>(p); }

template <class Half>
inline Words load_bits(const Half *p) {
    static_assert(sizeof(Half) == 2, "numbers of 16 bits");
    // As instructions, because GCC 12 widens each half of a vector and joins them.
#if defined(__AVX512F__)
    if constexpr (!DOUBLE)
        return (Words)_mm512_maskz_cvtepu16_epi32(0xFFFF, _mm256_loadu_si256(reinterpret_cast<const __m256i *>(p)));
#elif defined(__AVX2__)
    if constexpr (!DOUBLE) return (Words)_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p)));
#endif
    return __builtin_convertvector(*reinterpret_cast<const LooseHalves *>(p), Words);
}

// Templates, because these vectors do not exist in kernels of double.
template <class Half, class To = Vec, std::enable_if_t<std::is_same_v<Half, BFloat16>, int> = 0>
inline To load(const Half *p) {
    return reinterpret_cast<To>(load_bits(p) << 16);
}

template <class Half, class To = Vec, std::enable_if_t<std::is_same_v<Half, Float16>, int> = 0>
inline To load(const Half *p) {
#if defined(__AVX512F__)
    return reinterpret_cast<To>(
        _mm512_maskz_cvtph_ps(0xFFFF, _mm256_loadu_si256(reinterpret_cast<const __m256i *>(p))));
#elif defined(__F16C__)
    return reinterpret_cast<To>(_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p))));
#else
    const Words x = load_bits(p), size = x & 0x7FFF, sign = (x & 0x8000) << 16;
    const To small = __builtin_convertvector(reinterpret_cast<Labels32>(size), To) * Float16::LEAST;
    const Words large =
        (size << 13) + (size < 0x7C00 ? Words{} + Float16::EXPONENTS : Words{} + 2 * Float16::EXPONENTS);
    return reinterpret_cast<To>((size < 0x400 ? reinterpret_cast<Words>(small) : large) | sign);
#endif
}

// A template, because these vectors differ from kernel to kernel. `Integers` is one of its types, so that Clang does
// not compare sizes where the branch is not compiled.
template <class Byte, class To = Vec, class Integers = Labels32,
          std::enable_if_t<std::is_same_v<Byte, std::int8_t>, int> = 0>
inline To load(const Byte *p) {
    // As instructions, for the same reason.
#if defined(__AVX512F__)
    if constexpr (!DOUBLE) {
        const auto bytes = _mm_loadu_si128(reinterpret_cast<const __m128i *>(p));
        return __builtin_convertvector((Integers)_mm512_maskz_cvtepi8_epi32(0xFFFF, bytes), To);
    }
#elif defined(__AVX2__)
    if constexpr (!DOUBLE) {
        const auto bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i *>(p));
        return __builtin_convertvector((Integers)_mm256_cvtepi8_epi32(bytes), To);
    }
#endif
    return __builtin_convertvector(*reinterpret_cast<const LooseBytes *>(p), To);
}

inline void store(Real *p, Vec x) { *reinterpret_cast<Loose *>(p) = x; }
inline Vec splat(Real x) { return x - Vec{}; }

template <int... LANE>
inline Ints numbers(std::integer_sequence<int, LANE...>) {
    return Ints{LANE...};
}
inline Ints numbers() { return numbers(std::make_integer_sequence<int, LANES>()); }

#if defined(EMULATED)
#include "pairs_in_software.hpp"
#elif defined(__AVX512BF16__)
// a · b + c, where the lanes of a and b are pairs, and all lanes use the same pair of a.
inline Vec add_pairs(const BFloat16 *a, Vec b, Vec c) {
    std::int32_t pair;
    std::memcpy(&pair, a, sizeof(pair));
    const auto all = (__m512bh)_mm512_set1_epi32(pair);
    return (Vec)_mm512_dpbf16_ps((__m512)c, all, (__m512bh)b);
}

// Pairs of the lanes of two vectors, rounded to nearest.
inline Vec paired(Vec a, Vec b) {
    const Words lanes = reinterpret_cast<Words>(numbers());
    const Words in_turn = lanes | (lanes + LANES) << 16;
    return (Vec)_mm512_permutexvar_epi16((__m512i)in_turn, (__m512i)_mm512_cvtne2ps_pbh((__m512)b, (__m512)a));
}

// Store after rounding to nearest.
inline void store_rounded(BFloat16 *p, Vec x) {
    const auto rounded = _mm512_cvtneps_pbh((__m512)x);
    std::memcpy(p, &rounded, sizeof(rounded));
}
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
inline Vec add_pairs(const BFloat16 *a, Vec b, Vec c) {
    std::int32_t pair;
    std::memcpy(&pair, a, sizeof(pair));
    return (Vec)vbfdotq_f32((float32x4_t)c, (bfloat16x8_t)vdupq_n_s32(pair), (bfloat16x8_t)b);
}

inline LooseHalves rounded(Vec x) { return (LooseHalves)vcvt_bf16_f32((float32x4_t)x); }

inline Vec paired(Vec a, Vec b) {
    return (Vec)(__builtin_convertvector(rounded(a), Words) | __builtin_convertvector(rounded(b), Words) << 16);
}

inline void store_rounded(BFloat16 *p, Vec x) { *reinterpret_cast<LooseHalves *>(p) = rounded(x); }
#else
inline Vec add_pairs(const BFloat16 *, Vec, Vec c) { return c; }
inline Vec paired(Vec, Vec) { return Vec{}; }
inline void store_rounded(BFloat16 *, Vec) {}
#endif

inline Vec larger(Vec a, Vec b) { return a > b ? a : b; }

// The polynomial with these coefficients, the highest power first.
template <int N>
inline Vec polynomial(Vec x, const Real (&coefficients)[N]) {
    Vec p = x * coefficients[0] + coefficients[1];
    for (int i = 2; i < N; i++) p = p * x + coefficients[i];
    return p;
}

#if defined(__AVX512F__)  // one instruction looks up 16 numbers, so e^x = 2^(n / 16) · e^r, with a shorter polynomial
constexpr int PARTS = 16;
#else
constexpr int PARTS = 1;
#endif

// Constants of e^x: ln 2 in two pieces, and coefficients for (e^r - 1 - r) / r² where |r| is at most ln 2 / (2 PARTS).
template <class Real>
struct Exponential;

template <>
struct Exponential<float> {
    static constexpr float NEAREST = 12582912.0f, HIGH = 0.693359375f, LOW = -2.12194440e-4f;
    static constexpr std::int32_t OF_NEAREST = 0x4B400000, BIAS = 127, MANTISSA = 23;
#if defined(__AVX512F__)  // the polynomial of least error, 1 ulp
    static constexpr float COEFFICIENTS[] = {0.166668149315f, 0.500016211193f};
    static constexpr float POWERS[] = {1.000000000f, 1.044273782f, 1.090507733f, 1.138788635f,
                                       1.189207115f, 1.241857812f, 1.296839555f, 1.354255547f,
                                       1.414213562f, 1.476826146f, 1.542210825f, 1.610490332f,
                                       1.681792831f, 1.756252160f, 1.834008086f, 1.915206561f};  // of 2^(1 / 16)
#else  // Cephes' polynomial, 2 ulp
    static constexpr float COEFFICIENTS[] = {1.9875691500e-4f, 1.3981999507e-3f, 8.3334519073e-3f,
                                             4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f};
#endif
};

template <>
struct Exponential<double> {  // polynomials of least error, 1 ulp
    static constexpr double NEAREST = 6755399441055744.0, HIGH = 0x1.62e42fefa38p-1, LOW = 5.4979230187083712e-14;
    static constexpr std::int64_t OF_NEAREST = 0x4338000000000000, BIAS = 1023, MANTISSA = 52;
#if defined(__AVX512F__)
    static constexpr double COEFFICIENTS[] = {1.3888593450608246e-3, 8.3334721988681694e-3, 4.1666666693358048e-2,
                                              1.6666666664408929e-1, 4.9999999999999602e-1};
    static constexpr double POWERS[] = {
        1.00000000000000000, 1.04427378242741375, 1.09050773266525769, 1.13878863475669156,
        1.18920711500272103, 1.24185781207348400, 1.29683955465100964, 1.35425554693689265,
        1.41421356237309515, 1.47682614593949935, 1.54221082540794074, 1.61049033194925428,
        1.68179283050742900, 1.75625216037329945, 1.83400808640934243, 1.91520656139714740};
#else
    static constexpr double COEFFICIENTS[] = {2.5100385495510319e-8, 2.7620088445409748e-7, 2.7557268459997065e-6,
                                              2.4801521295954375e-5, 1.9841269863053617e-4, 1.3888888917213717e-3,
                                              8.3333333333300618e-3, 4.1666666666624128e-2, 1.6666666666666667e-1,
                                              5.0000000000000010e-1};
#endif
};

#if defined(__AVX512F__)
// (e^r - 1 - r) / r²
inline Vec tail(Vec r) { return polynomial(r, Exponential<Real>::COEFFICIENTS); }

// 2^(n / 16) for an integer n, which is in the last bits of a number: the last four of them select a power, and the
// others are added to its exponent.
inline Vec power_of_two(Vec shifted) {
    constexpr auto &powers = Exponential<Real>::POWERS;
    constexpr int SHIFT = Exponential<Real>::MANTISSA - 4;
    const Bits n = reinterpret_cast<Bits>(shifted), first = reinterpret_cast<Bits>(numbers()) << SHIFT;
    const Bits low = reinterpret_cast<Bits>(load(powers)) - first;  // less what the last four bits will add
    Bits found;
    if constexpr (DOUBLE) {
        const Bits high = reinterpret_cast<Bits>(load(powers + LANES)) - (first + ((Bits{} + LANES) << SHIFT));
        found = (Bits)_mm512_permutex2var_epi64((__m512i)low, (__m512i)n, (__m512i)high);
    } else {
        found = (Bits)_mm512_maskz_permutexvar_epi32(0xFFFF, (__m512i)n, (__m512i)low);
    }
    return reinterpret_cast<Vec>(found + (n << SHIFT));
}
#else
// (e^r - 1 - r) / r², in two chains of half the length that do not wait for each other.
inline Vec tail(Vec r) {
    constexpr auto &of = Exponential<Real>::COEFFICIENTS;
    Vec s = r * r, odd = splat(of[0]), even = splat(of[1]);
    for (unsigned i = 2; i < sizeof(of) / sizeof(Real); i += 2) odd = odd * s + of[i], even = even * s + of[i + 1];
    return odd * r + even;
}

inline Vec power_of_two(Vec shifted) {
    using By = Exponential<Real>;
    return reinterpret_cast<Vec>((reinterpret_cast<Ints>(shifted) - By::OF_NEAREST + By::BIAS) << By::MANTISSA);
}
#endif

// e^x for x <= 88: exactly 0 below e^-70, NaN for NaN.
inline Vec exponential(Vec x) {
    using By = Exponential<Real>;
    Vec shifted = x * Real(PARTS * 1.44269504088896341) + By::NEAREST;  // the nearest integer, in the last bits
    Vec n = shifted - By::NEAREST;
    Vec r = x - n * (By::HIGH / PARTS) - n * (By::LOW / PARTS);
    Vec less_one = tail(r) * (r * r) + r, power = power_of_two(shifted);
    Vec result = less_one * power + power;
    return x < NEGLIGIBLE ? Vec{} : result;  // below, `result` is meaningless
}

inline Vec hyperbolic_tangent(Vec x) {
    constexpr Real most = DOUBLE ? 20 : 10;  // all beyond rounds to 1
    Vec size = x < 0 ? -x : x, s = x * x;
    Vec held = size > most ? splat(most) : size;
    Vec far = 1 - 2 / (exponential(2 * held) + 1), near;
    if constexpr (DOUBLE)  // one more step of the continued fraction
        near = polynomial(s, {21, 1260, 10395}) / polynomial(s, {1, 210, 4725, 10395});
    else
        near = polynomial(s, {0.0218694885f, -0.0539682540f, 0.133333333f, -0.333333333f, 1});
    Vec result = size < Real(0.25) ? size * near : far;
    return x < 0 ? -result : result;
}

// The lanes of two vectors that `of` selects for each lane; the lanes of b follow those of a.
template <class Of, int... LANE>
inline Vec picked(Vec a, Vec b, Of of, std::integer_sequence<int, LANE...>) {
#if defined(__clang__) || __GNUC__ >= 12
    return __builtin_shufflevector(a, b, of(LANE)...);
#else
    return __builtin_shuffle(a, b, Ints{of(LANE)...});
#endif
}

template <class Of>
inline Vec picked(Vec a, Vec b, Of of) {
    return picked(a, b, of, std::make_integer_sequence<int, LANES>());
}

// The lanes of two vectors, interleaved, from lane FIRST on.
template <int FIRST>
inline Vec in_turn(Vec a, Vec b) {
    return picked(a, b, [](int n) { return FIRST + n / 2 + (n % 2 ? LANES : 0); });
}

// The lanes of a vector, rotated to begin with lane FIRST.
template <int FIRST>
inline Vec rotated(Vec x) {
    return picked(x, x, [](int n) { return FIRST + n; });
}

template <int N = LANES / 2>
inline Vec sum_in_all(Vec x) {
    if constexpr (N > 0) return sum_in_all<N / 2>(x + rotated<N>(x));
    return x;
}

template <int N = LANES / 2>
inline Vec largest_in_all(Vec x) {
    if constexpr (N > 0) return largest_in_all<N / 2>(larger(x, rotated<N>(x)));
    return x;
}

inline Real sum(Vec x) { return sum_in_all(x)[0]; }
inline Real largest(Vec x) { return largest_in_all(x)[0]; }

// Add, for each lane, two lanes of a or of b that differ in the bit STEP: of b where the lane has this bit, else of a.
template <int STEP>
inline Vec sum_of_halves(Vec a, Vec b) {
    return picked(a, b, [](int n) { return n & STEP ? n + LANES : n; }) +
           picked(a, b, [](int n) { return n & STEP ? (n ^ STEP) + LANES : n ^ STEP; });
}

// Return the sum of each of LANES vectors, in order.
template <int STEP = LANES / 2>
inline Vec sums(Vec *x) {
    if constexpr (STEP > 0) {
        for (int i = 0; i < STEP; i++) x[i] = sum_of_halves<STEP>(x[i], x[i + STEP]);
        return sums<STEP / 2>(x);
    }
    return x[0];
}

// The lanes of b whose numbers have the bit STEP, and the other lanes of a.
template <int STEP>
inline Vec blended(Vec a, Vec b) {
    return picked(a, b, [](int n) { return n & STEP ? n + LANES : n; });
}

// Skew 2 · LANES - 1 rows: lane l of row i becomes that of row i - l, for the rows from LANES - 1 on.
template <int STEP = LANES / 2>
inline void skew(Vec *x) {
    if constexpr (STEP > 0) {
#pragma GCC unroll 32
        for (int i = 2 * LANES - 2; i >= LANES - STEP; i--) x[i] = blended<STEP>(x[i], x[i - STEP]);
        skew<STEP / 2>(x);
    }
}

// Transpose LANES rows.
inline void transpose(Vec *x) {
    for (int step = LANES; step > 1; step /= 2) {
        Vec y[LANES];
        for (int i = 0; i < LANES / 2; i++) {
            y[2 * i] = in_turn<0>(x[i], x[i + LANES / 2]);
            y[2 * i + 1] = in_turn<LANES / 2>(x[i], x[i + LANES / 2]);
        }
        for (int i = 0; i < LANES; i++) x[i] = y[i];
    }
}

}  // namespace
