// Keys times a table: the mirror image of queries times a table, with transposed products.
#pragma once

#include "int8.hpp"
#include "look_up.hpp"

namespace {

// The table of the keys in reverse: its rows are for queries further and further ahead.
inline Array<const Stored> turned(Array<const Stored> table, Index rows) {
    if (table) table.at += (rows - 1) * table.row, table.row = -table.row;
    return table;
}

// A call seen from a block of keys, with the roles of queries and keys exchanged.
inline Problem seen_from_keys(Problem x) {
    x.left = x.rows - 1 - x.left, x.keys = ROWS;
    std::swap(x.before, x.after), std::swap(x.q_positions, x.k_positions), x.q_limits = {};
    return x;
}

struct KeySide {
    static constexpr Index ROW = ROWS + 2 * MARGIN;  // of the transposed products

    const Problem &x;
    const Problem seen;
    const Index width;
    Relative relative;
    Places places;  // of a block of keys, and of the block of queries
    ByRow by_row;
    Reals keys, changed;
    Reals table, products;                 // the table, scaled, from its last row to its first; products of a panel
    const Stored *given = nullptr;         // the address that the table was copied from
    std::int32_t positions[ROWS + SPARE];  // the positions of the queries

    explicit KeySide(const Problem &x)
        : x(x),
          seen(seen_from_keys(x)),
          width(padded(x.width)),
          relative(turned(x.key_table, x.rows), {}, Span::of(x).mirrored(), x.width, x.rel_scale),
          places(seen),
          by_row(seen, places) {}

    bool make(bool backward = false) {
        if (!x.key_table) return true;
        if (places || backward) changed = zeros((ROWS + HIGH + LANES) * ROW);
        if ((places || backward) && !changed) return false;
        if (!places) {
            table = reals((x.rows + HIGH) * x.width), products = reals((ROWS + PANEL + HIGH) * PANEL);
            return table && products;
        }
        const Index height = padded(ROWS, HIGH);
        keys = zeros(height * width);
        return keys && relative.make(height, std::max(ROWS, columns_anywhere(x)), true) && places.make() &&
               (!backward || by_row.make(height));
    }

    void take(Index entry, Index head) {
        if (!x.key_table) return;
        if (places) return relative.take(entry, head);
        const Stored *from = relative.table.of(entry, head);
        if (from == given) return;
        given = from;
        for (Index c = 0; c < x.rows; c++)
            for (Index d = 0; d < x.width; d++)
                table.get()[c * x.width + d] = from[c * relative.table.row + d] * x.rel_scale;
    }

    void take_queries(Index item, Index first, Index count) {
        if (!x.key_table || !places) return;
        std::copy_n(x.q_positions.of(item, 0) + first, count, positions);
        std::fill(positions + count, positions + ROWS + SPARE, positions[count - 1]);
        places.take(positions);
    }

    // Write the products of the packed keys start … start + n - 1 with the rows of the table for the queries from a
    // position on.
    void write(Index item, Index head, Index count, Index position, Index start, Index n, const Real *panels, Real *to,
               Index to_row) {
        for (Index j = 0; !places && j < n; j += PANEL)
            write_panel(count, start + j - position, panels + j * x.width, to + j, to_row);
        for (Index first = 0; places && first < n; first += ROWS) {
            const Index rows = std::min(ROWS, n - first), key = start + first;
            take_keys(item, head, key, rows);
            relative.take_edges(keys.get(), width, rows);
            look_up(item, key, rows, count);
            for (Index j = 0; j < rows; j += LANES)
                for (Index i = 0; i < count; i += LANES)
                    turn(of_key(j) + i, ROW, to + i * to_row + first + j, to_row, std::min<Index>(LANES, count - i), 1);
        }
    }

    // Write the products of a panel of keys, the first of which is `ahead` positions after the first query. Row by row,
    // they are multiplied by the table for one distance; the products for one query lie on a diagonal.
    void write_panel(Index count, Index ahead, const Real *panel, Real *to, Index to_row) {
        const Index rows = count + PANEL - 1, zero = x.rows - x.left - ahead - PANEL;  // the row of the table for row 0
        const Index low = std::clamp<Index>(-zero, 0, rows), high = std::clamp(x.rows - zero, low, rows);
        const auto multiply = [&](Index n, Index first, Index step, Real *at) {
            ::multiply<2>(n, x.width, Matrix{table.get() + first * x.width, step, 1}, panel, PANEL,
                          static_cast<const Real *>(nullptr), 0, at, PANEL);
        };
        multiply(high - low, zero + low, x.width, products.get() + low * PANEL);
        for (int side = 0; side < 2; side++) {
            const Index from = side ? high : 0, end = side ? rows : low;
            Real edge[4 * PANEL] = {};  // a product has at least four rows
            if (from < end && x.clip) multiply(1, side ? x.rows - 1 : 0, 0, edge);
            for (Index i = from; i < end; i++) std::copy_n(edge, PANEL, products.get() + i * PANEL);
        }
        for (Index half = 0; half < PANEL; half += LANES)
            for (Index i = 0; i < count; i += LANES) {
                Vec block[2 * LANES - 1];
                const Real *from = products.get() + (i + PANEL - half - LANES) * PANEL + half;
                for (Index t = 0; t < 2 * LANES - 1; t++) block[t] = load(from + t * PANEL);
                skew(block);
                for (Index t = 0; t < std::min<Index>(LANES, count - i); t++)
                    store(to + (i + t) * to_row + half, block[LANES - 1 + t]);
            }
    }

    // Write the products of some keys at the positions of the queries.
    void look_up(Index item, Index key, Index rows, Index count) {
        places.take_queries(item, key, rows);
        places.multiply(relative, keys.get(), width, rows);
        for (Index i = 0; i < count; i += PANEL) places.look_up(relative, 0, rows, i, of_key(0) + i, ROW, false);
    }

    // A row of the transposed gradients, with zeros around it.
    Real *of_key(Index j) const { return changed.get() + MARGIN + j * ROW; }

    // Add the contribution of the logits' gradients to those of the keys and of their table.
    void pull_back(const Rows &keys, Index item, Index count, Index position, Index start, Index n,
                   const Real *d_logits, Index row, Real *d_keys, Index d_keys_row, Real *d_table, Index d_table_row,
                   const Rows &table) {
        for (Index first = 0; first < n; first += ROWS) {
            const Index rows = std::min(ROWS, n - first), key = start + first;
            for (Index j = 0; j < rows + HIGH; j += LANES)  // products may read the zeros after the rows
                for (Index i = 0; i < padded(count); i += LANES)
                    turn(d_logits + i * row + first + j, row, of_key(j) + i, ROW, LANES, x.rel_scale);
            for (Index j = 0; j < rows + HIGH; j++)  // there is no query
                std::fill(of_key(j) + count, of_key(j) + ROWS, 0);
            const Real *own = keys.of(key);
            Real *d_own = d_keys + first * d_keys_row;
            if (places) {
                places.take_queries(item, key, rows), by_row.clear(rows);
                for (Index j = 0; j < rows; j++) by_row.add(j, {of_key(j), 0, count}, 0);
                by_row.spread(rows, own, keys.row, width, d_table, d_table_row);
                by_row.mix(rows, table, d_own, d_keys_row);
                continue;
            }
            const Weights weights{of_key(0), ROW, rows, key, position, 0, count};
            weights.spread(relative.span, own, keys.row, width, d_table, d_table_row);
            weights.mix(relative.span, table.of(0), table.row, width, d_own, d_keys_row);
        }
    }

    void take_keys(Index item, Index head, Index first, Index count) {
        for (Index j = 0; j < count; j++) copy_key(x, item, head / x.group(), first + j, keys.get() + j * width);
    }

    // Write LANES transposed rows with one entry per column, of which the first `wanted` are used.
    static void turn(const Real *from, Index from_row, Real *to, Index to_row, Index wanted, Real scale) {
        Vec block[LANES];
        for (Index t = 0; t < LANES; t++) block[t] = load(from + t * from_row) * scale;
        transpose(block);
        for (Index t = 0; t < wanted; t++) store(to + t * to_row, block[t]);
    }
};

}  // namespace
