// A block of queries and a table: products in relative layout, and sums over them.
#pragma once

#include "rows.hpp"

namespace {

constexpr Index MARGIN = ROWS + LANES;  // the most zeros around a row of weights, which skewed products read

using Reals = Memory<Real>;

inline Reals reals(Index count) {
    Reals found = memory<Real>(count + HIGH * LANES, false);
#if defined(POISON)  // with NaN, so that reading memory before it is written shows
    if (found) std::memset(found.get(), 0xFF, static_cast<std::size_t>(count + HIGH * LANES) * sizeof(Real));
#endif
    return found;
}

inline Reals zeros(Index count) {  // zero pages cost nothing until they are written to
    Reals found = memory<Real>(count + HIGH * LANES);
#if defined(POISON)  // the padding
    if (found) std::memset(found.get() + count, 0xFF, HIGH * LANES * sizeof(Real));
#endif
    return found;
}

template <class T>
inline bool finite(const T *x, Index width) {
    Vec zeros{};
    Index d = 0;
    for (; d + LANES <= width; d += LANES) zeros += load(x + d) * 0;
    Real nothing = sum(zeros);
    for (; d < width; d++) nothing += Real(x[d]) * 0;
    return nothing == 0;
}

// Rows of an array, padded to whole vectors. Where labels hide some rows between others, rows that are not finite are
// zeros here, and are only added to the queries that see them: 0 · NaN is not 0. The rows are copied only if there are
// such rows, if they are not whole vectors, or if rows that are read repeatedly are not adjacent, as projections leave
// those of a head: with strides of 2 KiB few of them fit into a cache.
struct Rows {
    static const Real *as_it_is(const Real *x) { return x; }
    static const Real *as_it_is(const void *) { return nullptr; }  // numbers that are converted

    Reals copy;
    Memory<Index> lost;
    const Stored *given = nullptr;
    Index row = 0, given_row = 0, width = 0, first = 0, copied = 0, lost_count = 0;
    bool is_copied = false, is_copy = false;

    bool make(Index rows, Index entries, bool labelled = false, bool apart = false) {
        width = entries, is_copied = CONVERTED || apart || padded(width) != width;
        const bool copied = labelled || is_copied;
        if (copied) copy = zeros(rows * padded(width));
        if (labelled) lost = memory<Index>(rows);
        return (copy || !copied) && (lost || !labelled);
    }

    // Take the rows first … end - 1 of an array; those before `from` are there already, and unchanged.
    void take(const Stored *all, Index all_row, Index first, Index from, Index end) {
        if (from == first) lost_count = 0, copied = first;
        given = all, given_row = all_row, this->first = first;
        for (Index j = from; lost && j < end; j++)
            if (!finite(all + j * all_row, width)) lost[lost_count++] = j;
        is_copy = is_copied || lost_count;
        row = is_copy ? padded(width) : given_row;
        for (; is_copy && copied < end; copied++)
            std::copy_n(all + copied * all_row, width, copy.get() + (copied - first) * row);
        for (Index i = 0; i < lost_count; i++) std::fill_n(copy.get() + (lost[i] - first) * row, width, 0);
    }

    const Real *of(Index j) const { return is_copy ? copy.get() + (j - first) * row : as_it_is(given + j * given_row); }

    // Add the rows first … first + n - 1 that are not finite, multiplied by the weights of some queries.
    void add_lost(const Real *weights, Index weights_row, Index count, Index first, Index n, Real *out,
                  Index out_row) const {
        for (Index i = 0; i < lost_count; i++) {
            const Index j = lost[i] - first;
            for (Index m = 0; m < count && 0 <= j && j < n; m++)
                if (const Real weight = weights[m * weights_row + j]; weight != 0)
                    for (Index d = 0; d < width; d++) out[m * out_row + d] += weight * given[lost[i] * given_row + d];
        }
    }
};

// The rows of a table, and the relative positions that occur: row c is for c - left. With blocks, the positions that
// are visible from one block.
struct Span {
    Index rows, left, before, after;
    bool clip;
    Index block, behind, ahead;

    static Span of(const Problem &x) {
        constexpr Index MOST = 4 * FAR;  // beyond every distance, unless positions are given, which do not use blocks
        const Index block = std::min(x.block, MOST), behind = block ? std::min(x.behind, MOST / block) : 0;
        return {x.rows, x.left, x.before, x.after, x.clip != 0, block, behind, 0};
    }

    // The same seen from the keys: the last row comes first.
    Span mirrored() const { return {rows, rows - 1 - left, after, before, clip, block, ahead, behind}; }
};

// Products of a block of queries with a table, and a bias, in relative layout. The logits are added to these.
struct Relative {
    const Array<const Stored> table, bias;
    const Span span;
    const Index width;
    const Real scale;
    bool in_pairs = false;  // whether the table is packed by pairs
    Real of_bias = 1;       // the factor of biases
    Index row = 0;          // the step between rows of `products`
    bool whole = false;     // whether `products` holds all rows of a block; else a strip, which the next one overwrites
    Reals panels, biases, products;
    Index entry = -1, head = -1;
    Real edges[2][ROWS];

    Relative(Array<const Stored> table, Array<const Stored> bias, Span span, Index width, Real scale = 1)
        : table(table), bias(bias), span(span), width(table ? width : 0), scale(scale) {}

    explicit operator bool() const { return table || bias; }

    // Allocate for blocks of this many rows and columns: for the products of all rows, or of one strip.
    bool make(Index height, Index columns, bool all) {
        if (!*this) return true;
        whole = all;
        row = columns + ROWS + 4 * PANEL;
        panels = reals(padded(span.rows, PANEL) * width);
        biases = reals(padded(span.rows, PANEL) + PANEL);
        products = reals((whole ? height : STRIP) * row);
        return panels && biases && products;
    }

    void take(Index of_entry, Index of_head) {
        const bool known =
            head >= 0 && !table.moved(entry, head, of_entry, of_head) && !bias.moved(entry, head, of_entry, of_head);
        if (!*this || known) return;
        entry = of_entry, head = of_head;
        if (table) pack_as(in_pairs, table.of(entry, head), table.row, span.rows, width, panels.get());
        for (Index c = 0; bias && c < span.rows; c++) biases.get()[c] = bias.of(entry, head)[c] * of_bias;
        for (Index i = 0; scale != 1 && i < padded(span.rows, PANEL) * width; i++) panels.get()[i] *= scale;
    }

    // Compute the products of a block's queries with the edge rows, for positions beyond the table.
    void take_edges(const Real *queries, Index queries_row, Index count) {
        if (!*this || !span.clip) return;
        for (int side = 0; side < 2; side++) {
            const Index c = side ? span.rows - 1 : 0;
            for (Index m = 0; m < count; m++)
                edges[side][m] = (table ? dot(queries + m * queries_row, table.of(entry, head, c), width) * scale : 0) +
                                 (bias ? bias.of(entry, head)[c] * of_bias : 0);
        }
    }

    // The relative position of column 0, chosen so that panels of the table stay whole; `lowest` is the lowest position
    // of a block.
    Index origin(Index lowest) const { return floored(lowest + span.left, PANEL) - span.left; }

    // Write the products of some queries for the relative positions low … high - 1.
    void multiply(const Real *queries, Index queries_row, Index m, Index rows, Index low, Index high, Index origin) {
        write(Matrix{queries + m * queries_row, queries_row, 1}, m, rows, low, high, origin);
    }

    // The same for rows of queries, as numbers or as pairs.
    template <class A>
    void write(const A &a, Index m, Index rows, Index low, Index high, Index origin) {
        const Index shift = span.left, have = span.rows, depth = in_pairs ? (width + 1) / 2 : width;
        const Index start = low + shift, stop = high + shift;  // rows of the table, some of which may not exist
        const auto column = [&](Index c) { return products.get() + place(m) * row + (c - shift - origin); };
        constexpr bool TOGETHER = std::is_same_v<A, Paired> ? TILES : REPEATED;  // all panels
        Index c = floored(std::max<Index>(0, start), TOGETHER ? PANEL : LANES);
        if constexpr (TOGETHER)
            if (c < std::min(have, stop)) {
                struct FromBias {
                    const Real *at;
                    Index row = 0;
                };
                const auto start_of = [&](Index i) { return FromBias{bias ? biases.get() + c + i : nullptr}; };
                multiply_panels(std::min(have, stop) - c, rows, depth, a, panels.get() + c * depth, start_of, column(c),
                                row);
                c = have;
            }
        while (c < std::min(have, stop)) {
            const bool whole = c % PANEL == 0 && c + LANES < std::min(have, stop);
            const Real *b = panels.get() + floored(c, PANEL) * depth + c % PANEL,
                       *with = bias ? biases.get() + c : nullptr;
            if (whole)
                ::multiply<2>(rows, depth, a, b, PANEL, with, 0, column(c), row);
            else
                ::multiply<1>(rows, depth, a, b, PANEL, with, 0, column(c), row);
            c += whole ? PANEL : LANES;
        }
        for (Index i = m; i < m + rows; i++) {
            const Index zero = (i - m + place(m)) * row - shift - origin;  // where the packed columns would begin
            const auto fill = [&](Index from, Index to, Real x) {
                std::fill(products.get() + (zero + from), products.get() + (zero + to), x);
            };
            if (start < 0) fill(start, std::min<Index>(0, stop), span.clip ? edges[0][i] : 0);
            if (stop > have) fill(std::max(have, start), stop, span.clip ? edges[1][i] : 0);
        }
    }

    // The row of `products` of query m, the first one of a strip.
    Index place(Index m) const { return whole ? m : 0; }

    // The address of the product of query m, at position p, with a key; the next row is a step shorter than `row` away.
    const Real *at(Index m, Index key, Index p, Index origin) const {
        return *this ? products.get() + place(m) * row + (key - p - origin) : nullptr;
    }
};

// Some queries, `count` of them from position p on, and the keys start + low … start + high - 1, of which they see
// some. `weights` are those of the queries and the keys from `start` on, with zeros around.
struct Weights {
    const Real *at;
    Index row, count, p, start, low, high;

    // The rows of a table that they use. No other rows are read: they may be NaN, and 0 · NaN is not 0.
    Seen used(const Span &x) const {
        const Index first = start + low, end = start + high;
        Seen found{first - (p + count - 1), end - p};
        if (x.block) {  // some of the queries may see none of the keys
            std::swap(found.low, found.high);
            for (Index i = p; i < p + count; i++) {
                const Index own = floored(i, x.block);
                const Index from = std::max(first, own - x.behind * x.block);
                const Index to = std::min(end, own + (x.ahead + 1) * x.block);
                if (from < to) found = {std::min(found.low, from - i), std::max(found.high, to - i)};
            }
        }
        const Index low_row = std::max(found.low, -x.before) + x.left;
        return {std::max<Index>(0, low_row), std::min(x.rows, std::min(found.high, x.after + 1) + x.left)};
    }

    // The queries that use some of n rows of a table from one on.
    Columns using_rows(const Span &x, Index from, Index n) const {
        const Index key = p + from - x.left - start;  // of the first query and the first row
        return {std::max<Index>(0, low - (key + n - 1)), std::min(count, high - key)};
    }

    // The sum of the weights of query i over all keys before the table, or after it.
    Real beyond(const Span &x, Index i, int side) const {
        const Index left = p + i - x.left - start, right = left + x.rows;
        Index j = side ? std::max(low, right) : low;
        const Index end = side ? high : std::min(high, left);
        Vec totals{};
        for (; j + LANES <= end; j += LANES) totals += load(at + i * row + j);
        Real total = sum(totals);
        for (; j < end; j++) total += at[i * row + j];
        return total;
    }

    // Add the rows of a table, multiplied by the weights: a product with their skewed view.
    void mix(const Span &x, const Real *table, Index table_row, Index width, Real *out, Index out_row) const {
        const auto [c, stop] = used(x);
        if (c < stop)
            add_product(count, stop - c, Matrix{at + (c - x.left + p - start), row + 1, 1}, table + c * table_row,
                        table_row, width, out, out_row);
        mix_beyond(x, table, table_row, width, out, out_row);
    }

    void mix_beyond(const Span &x, const Real *table, Index table_row, Index width, Real *out, Index out_row) const {
        for (int side = 0; side < 2 && x.clip; side++)
            for (Index i = 0; i < count; i++)
                add_row(beyond(x, i, side), table + (side ? x.rows - 1 : 0) * table_row, width, out + i * out_row);
    }

    // Add the queries' rows, multiplied by the weights, to the gradients of the table's rows.
    void spread(const Span &x, const Real *from, Index from_row, Index width, Real *table, Index table_row) const {
        const Seen rows = used(x);
        const Matrix turned{at + (rows.low - x.left + p - start), 1, row + 1};
        const auto of_rows = [&](Index i, Index n) { return using_rows(x, rows.low + i, n); };
        add_band(rows.high - rows.low, of_rows, turned, from, from_row, width, table + rows.low * table_row, table_row);
        spread_beyond(x, from, from_row, width, table, table_row);
    }

    void spread_beyond(const Span &x, const Real *from, Index from_row, Index width, Real *table,
                       Index table_row) const {
        for (int side = 0; side < 2 && x.clip; side++)
            for (Index i = 0; i < count; i++)
                add_row(beyond(x, i, side), from + i * from_row, width, table + (side ? x.rows - 1 : 0) * table_row);
    }

    static void add_row(Real weight, const Real *from, Index width, Real *to) {
        if (weight == 0) return;
        for (Index d = 0; d < width; d += LANES) store(to + d, load(to + d) + load(from + d) * weight);
    }
};

}  // namespace
