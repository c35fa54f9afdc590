// Rows as pairs of bfloat16, for processors that multiply pairs: pairs of columns of the left factor of a product, and
// pairs of rows of the right one.
#pragma once

#include "relative.hpp"

namespace {

// The numbers of two rows as pairs, of which `rows` exist: the others are zeros.
inline Vec pair_of_rows(const Real *x, Index row, Index rows) {
    return rows <= 0 ? Vec{} : paired(load(x), rows > 1 ? load(x + row) : Vec{});
}

// Rounded rows, padded with HIGH rows and a vector; `margin` is how far columns begin before 0.
struct Rounded {
    Memory<BFloat16> at;
    Index row = 0, margin = 0;

    bool make(Index rows, Index columns, Index before = 0) {
        row = padded(columns + LANES, 2 * LANES), margin = before;  // whole cache lines
        at = memory<BFloat16>((rows + HIGH) * row + LANES);
        return static_cast<bool>(at);
    }

    // Round the columns low … high - 1 of some rows, and those after them up to a whole vector.
    void take(const Real *x, Index x_row, Index rows, Index low, Index high) {
        BFloat16 *to = at.get() + margin;
        for (Index i = 0; i < rows; i++, to += row, x += x_row)
            for (Index j = low; j < high; j += LANES) store_rounded(to + j, load(x + j));
    }

    // The rows from row i on; in a skewed view each begins one column further.
    Paired from(Index i, Index skew = 0) const { return {at.get() + i * row + margin, row + skew, 2}; }
};

// Pairs of rows for each column, as the right factor of a product has them. Tiles read whole ones: pairs after the last
// row are zeros.
struct Joined {
    Reals at;
    Index row = 0;

    bool make(Index rows, Index columns) {
        row = padded(columns);
        at = reals(depth(rows) * row);
        return static_cast<bool>(at);
    }

    static Index depth(Index rows) { return padded((rows + 1) / 2, TILES ? TILE_PAIRS : 1); }

    // The pairs that hold some rows, of `depth` in all.
    static Columns pairs(Columns rows, Index depth) {
        constexpr Index WHOLE = TILES ? 2 * TILE_PAIRS : 2;
        return {floored(rows.from, WHOLE) / 2, std::min(depth, padded(rows.end, WHOLE) / 2)};
    }

    void take(const Real *x, Index x_row, Index rows, Index columns) {
        for (Index i = 0; i < depth(rows); i++)
            for (Index j = 0; j < columns; j += LANES)
                store(at.get() + i * row + j, pair_of_rows(x + 2 * i * x_row + j, x_row, rows - 2 * i));
    }
};

// Rounded rows, transposed, so that columns become the rows of a left factor: pairs of rows for each column, with as
// many pairs as `Joined` has. For vectors, pairs of a column are `row` apart; for tiles, they are adjacent.
struct Turned {
    Reals at;
    Index row = 0, margin = 0;

    bool make(Index rows, Index columns, Index before = 0) {
        margin = before;
        row = TILES ? Joined::depth(rows) : columns + 2 * LANES;
        at = reals(TILES ? (columns + HIGH + 2 * LANES) * row : (rows + 1) / 2 * row);
        return static_cast<bool>(at);
    }

    // Round the columns low … high - 1 of some rows from the even row `first` on, and those after them up to a whole
    // vector. In a skewed view, each row begins `skew` columns further on than the one above.
    void take(const Real *x, Index x_row, Index first, Index rows, Index low, Index high, Index skew = 0) {
        if constexpr (TILES) {
            for (Index j = low - skew * (rows - 1); j < high; j += LANES)
                for (Index i = 0; i < Joined::depth(rows); i += LANES) {
                    Vec block[LANES];
                    for (Index t = 0; t < LANES; t++) {
                        const Index r = 2 * (i + t);
                        block[t] = pair_of_rows(x + r * (x_row + skew) + j, x_row + skew, rows - r);
                    }
                    transpose(block);
                    for (Index t = 0; t < LANES; t++) store(at.get() + (margin + j + t) * row + i, block[t]);
                }
        } else {
            Real *to = at.get() + first / 2 * row + margin;
            x += first * x_row;
            for (Index i = 0; i < rows; i += 2, to += row, x += 2 * x_row)
                for (Index j = low - skew; j < high; j += LANES)
                    store(to + j, pair_of_rows(x + j, x_row + skew, rows - i));
        }
    }

    // The columns from one on; `skew` as they were taken.
    Paired from(Index column, Index skew = 0) const {
        const auto *all = reinterpret_cast<const BFloat16 *>(at.get());
        if constexpr (TILES) return {all + 2 * (margin + column) * row, 2 * row, 2};
        return {all + 2 * (margin + column), 2, 2 * (row + 2 * skew)};
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
    void mix(Index count, const Real *weights, Index weights_row, const Paired &rounded, Index column, Index low,
             Index high, Real *out, Index out_row) const {
        const auto mix_one = [&](Index j, Index own) {
            for (Index i = 0; i < count; i++)
                for (Index d = 0; d < width; d++)
                    out[i * out_row + d] += weights[i * weights_row + own] * given[j * given_row + d];
        };
        if (low < high && (low - first) % 2) mix_one(low++, column++);
        if (low < high && (high - low) % 2) high--, mix_one(high, column + high - low);
        if (low >= high) return;
        const Paired from{rounded.at + column, rounded.row};
        add_product(count, (high - low) / 2, from, at.get() + (low - first) / 2 * row, row, row, out, out_row);
    }
};

}  // namespace
