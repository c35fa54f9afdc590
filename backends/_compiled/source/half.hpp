// Numbers of 16 bits: arrays may be made of them, and everything is computed in floats.
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

// The higher half of a float.
struct BFloat16 {
    std::uint16_t bits;

    BFloat16() = default;

    // Round to the nearest, to even where two are as near.
    BFloat16(float x) {
        const std::uint32_t own = bits_as<std::uint32_t>(x), nearest = own + 0x7FFF + (own >> 16 & 1);
        bits = static_cast<std::uint16_t>((x == x ? nearest : own | 0x400000) >> 16);
    }

    operator float() const { return bits_as<float>(static_cast<std::uint32_t>(bits) << 16); }
};

// IEEE's binary16: 5 bits of exponent, 10 of mantissa.
struct Float16 {
    static constexpr std::uint32_t EXPONENTS = 112u << 23;  // by which those of floats are larger
    static constexpr float LEAST = 0x1p-24f;
    std::uint16_t bits;

    Float16() = default;

    Float16(float x) {
        const std::uint32_t own = bits_as<std::uint32_t>(x), size = own & 0x7FFFFFFF;
        const std::uint32_t normal = (size - EXPONENTS + 0xFFF + (size >> 13 & 1)) >> 13;
        // The terms have LEAST as their last bit.
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

// What arrays of some numbers are computed in.
template <class Stored>
struct Computed {
    using Real = float;
};

template <>
struct Computed<double> {
    using Real = double;
};
