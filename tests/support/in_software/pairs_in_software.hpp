// The instructions of AVX512-BF16 in C++, for tests on processors that have none. simd.hpp includes this file, and only
// kernels of bfloat16 are compiled with it.

inline Words lower(Words x) { return x << 16; }
inline Words upper(Words x) { return x & 0xFFFF0000; }

inline Vec add_pairs(const BFloat16 *a, Vec b, Vec c) {
    return c + static_cast<float>(a[0]) * reinterpret_cast<Vec>(lower(reinterpret_cast<Words>(b))) +
           static_cast<float>(a[1]) * reinterpret_cast<Vec>(upper(reinterpret_cast<Words>(b)));
}

inline Words rounded_bits(Vec x) {
    Words bits{};
    for (int i = 0; i < LANES; i++) bits[i] = BFloat16(x[i]).bits;
    return bits;
}

inline Vec paired(Vec a, Vec b) { return reinterpret_cast<Vec>(rounded_bits(a) | rounded_bits(b) << 16); }

inline void store_rounded(BFloat16 *p, Vec x) {
    for (int i = 0; i < LANES; i++) p[i] = BFloat16(x[i]);
}
