// Keys and values in int8, of which each row is multiplied by its scale.
#pragma once

#include "tile.hpp"

namespace {

template <class To>
inline void dequantise(const std::int8_t *from, float scale, Index width, To *to) {
    for (Index d = 0; d < width; d++) to[d] = To(Real(from[d]) * Real(scale));
}

// Multiply the numbers of n rows by their scales.
inline void multiply_by(const float *scales, Index step, const Real *from, Index n, Real *to) {
    for (Index j = 0; j < n; j++) to[j] = from[j] * Real(scales[j * step]);
}

inline void copy_key(const Problem &x, Index item, Index head, Index key, Real *to) {
    if (x.in_int8)
        dequantise(x.k_int8.of(item, head, key), *x.k_scale.of(item, head, key), x.width, to);
    else
        std::copy_n(x.k.of(item, head, key), x.width, to);
}

// The keys or the values of a head: in place, or dequantised.
struct HeadRows {
    const Array<const Stored> &given;
    const Array<const std::int8_t> &quantised;
    const Array<const float> &scales;
    const Index width;
    Memory<Stored> copy;

    static HeadRows keys(const Problem &x) { return {x.k, x.k_int8, x.k_scale, x.width, {}}; }
    static HeadRows values(const Problem &x) { return {x.v, x.v_int8, x.v_scale, x.value_width, {}}; }

    bool make(Index rows) {
        if (quantised) copy = memory<Stored>(rows * width);
        return copy || !quantised;
    }

    Index row() const { return quantised ? width : given.row; }

    // Return the rows of a head, from row 0 on, of which first … end - 1 are needed.
    const Stored *take(Index item, Index head, Index first, Index end) const {
        if (!quantised) return given.of(item, head);
        for (Index j = first; j < end; j++)
            dequantise(quantised.of(item, head, j), *scales.of(item, head, j), width, copy.get() + j * width);
        return copy.get();
    }
};

}  // namespace
