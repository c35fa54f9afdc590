// Keys that meet a table: as queries do, seen from the keys, whose products are turned around.
#pragma once

#include "look_up.hpp"

namespace {

// The table of the keys from its last row to its first: row by row what queries further and further on meet.
inline Array<const Real> turned(Array<const Real> table, Index rows) {
    if (table) table.at += (rows - 1) * table.row, table.row = -table.row;
    return table;
}

struct KeySide {
    static constexpr Index ROW = ROWS + 2 * MARGIN;  // of what is turned around

    const Problem &x;
    const Index width;
    Relative relative;
    Reals keys, changed;

    explicit KeySide(const Problem &x)
        : x(x),
          width(padded(x.width)),
          relative(turned(x.key_table, x.rows), {}, Span::of(x).mirrored(), x.width, x.rel_scale) {}

    bool make() {
        if (!x.key_table) return true;
        keys = zeros(padded(ROWS, HIGH) * width);
        changed = zeros((ROWS + HIGH + LANES) * ROW);
        return keys && changed && relative.make(padded(ROWS, HIGH), ROWS);
    }

    void take(Index head) { relative.take(head); }

    // Write the products of the keys start … start + n - 1 with what queries from a position on meet of the table.
    void write(Index item, Index head, Index count, Index position, Index start, Index n, Real *to, Index to_row) {
        for (Index first = 0; first < n; first += ROWS) {
            const Index rows = std::min(ROWS, n - first), key = start + first;
            const Index origin = relative.origin(position - (key + ROWS - 1));
            take_keys(item, head, key, rows);
            relative.take_edges(keys.get(), width, rows);
            for (Index m = 0; m < rows; m += HIGH) {
                const Index own = std::min<Index>(HIGH, rows - m), low = position - (key + m + own - 1);
                relative.multiply(keys.get(), width, m, own, low, position + count - (key + m), origin);
            }
            for (Index j = 0; j < rows; j += LANES)
                for (Index i = 0; i < count; i += LANES)
                    turn(relative.at(j, position + i, key + j, origin), relative.row - 1, to + i * to_row + first + j,
                         to_row, std::min<Index>(LANES, count - i), 1);
        }
    }

    // Add what the gradients of logits make of keys and of their table to the gradients of both.
    void pull_back(const Rows &keys, Index count, Index position, Index start, Index n, const Real *d_logits, Index row,
                   Real *d_keys, Index d_keys_row, Real *d_table, Index d_table_row, const Rows &table) {
        for (Index first = 0; first < n; first += ROWS) {
            const Index rows = std::min(ROWS, n - first), key = start + first;
            for (Index j = 0; j < rows + HIGH; j += LANES)  // past them are zeros, which products may read
                for (Index i = 0; i < padded(count); i += LANES)
                    turn(d_logits + i * row + first + j, row, changed.get() + MARGIN + j * ROW + i, ROW, LANES,
                         x.rel_scale);
            for (Index j = 0; j < rows + HIGH; j++)  // no query stands there
                std::fill(changed.get() + MARGIN + j * ROW + count, changed.get() + MARGIN + j * ROW + ROWS, 0);
            const Weights weights{changed.get() + MARGIN, ROW, rows, key, position, 0, count};
            weights.spread(relative.span, keys.at + key * keys.row, keys.row, width, d_table, d_table_row);
            weights.mix(relative.span, table.at, table.row, width, d_keys + first * d_keys_row, d_keys_row);
        }
    }

    void take_keys(Index item, Index head, Index first, Index count) {
        for (Index j = 0; j < count; j++)
            std::memcpy(keys.get() + j * width, x.k.of(item, head / x.group(), first + j), x.width * sizeof(Real));
    }

    // Write LANES rows of as many entries as columns, of which some are wanted.
    static void turn(const Real *from, Index from_row, Real *to, Index to_row, Index wanted, Real scale) {
        Vec block[LANES];
        for (Index t = 0; t < LANES; t++) block[t] = load(from + t * from_row) * scale;
        transpose(block);
        for (Index t = 0; t < wanted; t++) store(to + t * to_row, block[t]);
    }
};

}  // namespace
