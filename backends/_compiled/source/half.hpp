// 16-bit numbers: arrays may hold them, and everything is computed in float.
#pragma once

#include <cstdint>
#include <cstring>

template <class To, class From>
inline To bits_as(From x) {
    static_assert(sizeof(To) == sizeof(From), "the same bits");
    To found;
    std::memcpy(&found, &x, sizeof(To));
    return found;
}

// The upper half of a float.
struct BFloat16 {
    std::uint16_t bits;

    BFloat16() = default;

    // Round to nearest, ties to even.
    BFloat16(float x) {
        const std::uint32_t own = bits_as<std::uint32_t>(x), nearest = own + 0x7FFF + (own >> 16 & 1);
        bits = static_cast<std::uint16_t>((x == x ? nearest : own | 0x400000) >> 16);
    }

    operator float() const { return bits_as<float>(static_cast<std::uint32_t>(bits) << 16); }
};

// IEEE's binary16: 5 bits of exponent, 10 of mantissa.
struct Float16 {
    static constexpr std::uint32_t EXPONENTS = 112u << 23;  // the difference from the exponents of float
    static constexpr float LEAST = 0x1p-24f;
    std::uint16_t bits;

    Float16() = default;

    Float16(float x) {
        const std::uint32_t own = bits_as<std::uint32_t>(x), size = own & 0x7FFFFFFF;
        const std::uint32_t normal = (size - EXPONENTS + 0xFFF + (size >> 13 & 1)) >> 13;
        // The last bit of both terms has the value LEAST.
        const std::uint32_t small = bits_as<std::uint32_t>(bits_as<float>(size) + 0.5f) - bits_as<std::uint32_t>(0.5f);
        const std::uint32_t large = size > 0x7F800000 ? 0x7E00 : 0x7C00;
        const std::uint32_t found = size < EXPONENTS + (1u << 23) ? small : size < 0x477FF000 ? normal : large;
        bits = static_cast<std::uint16_t>(found | (own >> 16 & 0x8000));
    }

    operator float() const {
        const std::uint32_t size = bits & 0x7FFF, sign = (bits & 0x8000u) << 16;
        const float small = static_cast<float>(static_cast<std::int32_t>(size)) * LEAST;
        const std::uint32_t large = (size << 13) + (size < 0x7C00 ? EXPONENTS : 2 * EXPONENTS);
        return bits_as<float>((size < 0x400 ? bits_as<std::uint32_t>(small) : large) | sign);
    }
};

// The type in which arrays of a type are computed.
template <class Stored>
struct Computed {
    using Real = float;
};

template <>
struct Computed<double> {
    using Real = double;
};
