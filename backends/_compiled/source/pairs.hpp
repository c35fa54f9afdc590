// Rows as pairs of bfloat16, for processors that multiply pairs: pairs of columns of the left factor of a product, and
// pairs of rows of the right one.
#pragma once

#include "relative.hpp"

namespace {

// Rounded rows, padded with HIGH rows and a vector; `margin` is how far columns begin before 0.
struct Rounded {
    Memory<BFloat16> at;
    Index row = 0, margin = 0;

    bool make(Index rows, Index columns, Index before = 0) {
        row = columns + LANES, margin = before;
        at = memory<BFloat16>((rows + HIGH) * row + LANES);
        return static_cast<bool>(at);
    }

    // Round the columns low … high - 1 of some rows, and those after them up to a whole vector.
    void take(const Real *x, Index x_row, Index rows, Index low, Index high) {
        for (Index i = 0; i < rows; i++)
            for (Index j = low; j < high; j += LANES)
                store_rounded(at.get() + i * row + margin + j, load(x + i * x_row + j));
    }

    // The rows from row i on; in a skewed view each begins one column further.
    Paired from(Index i, Index skew = 0) const { return {at.get() + i * row + margin, row + skew, 2}; }
};

// Rounded rows, interleaved by pairs: transposed, so that rows become the columns of a left factor.
struct Turned {
    Reals at;
    Index row = 0, margin = 0;

    bool make(Index rows, Index columns, Index before = 0) {
        row = columns + 2 * LANES, margin = before;
        at = reals((rows + 1) / 2 * row);
        return static_cast<bool>(at);
    }

    // Round the columns low … high - 1 of some rows, and those after them up to a whole vector; in every second row,
    // those that are `skew` further on.
    void take(const Real *x, Index x_row, Index rows, Index low, Index high, Index skew = 0) {
        for (Index i = 0; i < rows; i += 2)
            for (Index j = low; j < high; j += LANES)
                store(at.get() + i / 2 * row + margin + j,
                      paired(load(x + i * x_row + j), i + 1 < rows ? load(x + (i + 1) * x_row + j + skew) : Vec{}));
    }

    // The columns from one on; in a skewed view each row begins `skew` further on.
    Paired from(Index column, Index skew = 0) const {
        return {reinterpret_cast<const BFloat16 *>(at.get() + margin + column), 2, 2 * (row + 2 * skew)};
    }
};

// Interleave rows of bfloat16 by pairs, padded to whole vectors; missing rows are zeros.
template <class T, class To = Vec>
void join_pairs(const T *x, Index row, Index rows, Index width, Real *to) {
    if constexpr (PAIRS) {
        const Index to_row = padded(width), whole = width / LANES * LANES;
        for (Index j = 0; j < rows; j += 2, to += to_row) {
            const bool both = j + 1 < rows;
            const T *first = x + j * row, *second = both ? first + row : first;
            for (Index d = 0; d < whole; d += LANES)
                store(to + d,
                      reinterpret_cast<To>(load_bits(first + d) | (both ? load_bits(second + d) << 16 : Words{})));
            for (Index d = whole; d < to_row; d++) {
                T pair[2] = {};
                if (d < width) pair[0] = first[d], pair[1] = both ? second[d] : T(0);
                std::memcpy(to + d, pair, sizeof(pair));
            }
        }
    }
}

// Rows of an array, interleaved by pairs.
struct JoinedRows {
    Reals at;
    const Stored *given = nullptr;
    Index given_row = 0, row = 0, width = 0, first = 0;

    bool make(Index rows, Index columns) {
        row = padded(columns), width = columns;
        at = reals((rows + 1) / 2 * row);
        return static_cast<bool>(at);
    }

    // Take the rows first … end - 1; those before `from`, an even number, are there already.
    void take(const Stored *all, Index all_row, Index first, Index from, Index end) {
        given = all, given_row = all_row, this->first = first;
        join_pairs(all + from * all_row, all_row, end - from, width, at.get() + (from - first) / 2 * row);
    }

    // Add the product of some rows of weights with the rows low … high - 1; their weights are in the columns from
    // `column` on. No other rows are read: they may be NaN, and 0 · NaN is not 0.
    void mix(Index count, const Real *weights, Index weights_row, Paired rounded, Index column, Index low, Index high,
             Real *out, Index out_row) const {
        const auto mix_one = [&](Index j, Index own) {
            for (Index i = 0; i < count; i++)
                for (Index d = 0; d < width; d++)
                    out[i * out_row + d] += weights[i * weights_row + own] * given[j * given_row + d];
        };
        if (low < high && (low - first) % 2) mix_one(low++, column++);
        if (low < high && (high - low) % 2) high--, mix_one(high, column + high - low);
        if (low >= high) return;
        rounded.at += column;
        add_product(count, (high - low) / 2, rounded, at.get() + (low - first) / 2 * row, row, row, out, out_row);
    }
};

}  // namespace
