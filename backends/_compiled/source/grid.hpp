// Keys on a grid: their logits get the product of the query with one row of a table for each axis.
//
// A block of queries is multiplied by the tables once. All keys of a grid row then share the terms of the outer axes;
// along the innermost axis, consecutive keys read consecutive products.
#pragma once

#include "relative.hpp"

namespace {

struct Grid {
    static constexpr Index SIDES = Sizes::SIDES, INNER = SIDES - 1;

    const Problem &x;
    const Index width, outside;  // the width of a padded row of tables; the number of keys before the grid
    Index columns[SIDES], rows[SIDES], places[SIDES], row = 0, count = 0, begin = 0;  // where each side begins
    Seen used[SIDES] = {};  // columns that the queries of a block use
    Reals panels, products, own, terms, changes, changed;
    Rows table;
    Index entry = 0, head = -1;

    explicit Grid(const Problem &x)
        : x(x), width(padded(x.width)), outside(x.axis_tables ? x.keys - x.cells(&Side::keys) : 0) {
        for (Index side = 0, of_rows = 0; *this && side < SIDES; side++) {
            columns[side] = row, rows[side] = of_rows, places[side] = count;
            if (!x.sides[side].keys) continue;
            row += padded(x.sides[side].rows() + HIGH, PANEL) + PANEL, of_rows += x.sides[side].rows();
            count += x.sides[side].keys;
        }
    }

    explicit operator bool() const { return static_cast<bool>(x.axis_tables); }

    // Allocate for blocks of this many queries and rows of this many keys.
    bool make(Index height, Index keys, bool backward = false) {
        if (!*this) return true;
        panels = reals(row * x.width), products = reals((height + HIGH) * row);
        own = reals(count + LANES), terms = reals(keys + 2 * LANES);
        if (backward) changes = reals(count + LANES), changed = reals((height + HIGH) * row);
        return panels && products && own && terms &&
               (!backward || (changes && changed && table.make(x.axis_rows(), x.width, false)));
    }

    void take(Index of_entry, Index of_head) {
        if (!*this || (head >= 0 && !x.axis_tables.moved(entry, head, of_entry, of_head))) return;
        entry = of_entry, head = of_head;
        for (Index side = 0; side < SIDES; side++)
            if (x.sides[side].keys)
                pack(x.axis_tables.of(entry, head, rows[side]), x.axis_tables.row, x.sides[side].rows(), x.width,
                     panels.get() + columns[side] * x.width);
        if (changed) table.take(x.axis_tables.of(entry, head), x.axis_tables.row, 0, 0, x.axis_rows());
    }

    // Write the products of the queries of a block; `first` is its first query.
    void multiply(const Real *queries, Index queries_row, Index first, Index n) {
        if (!*this) return;
        begin = first;
        for (Index side = 0; side < SIDES; side++) {
            used[side] = {x.sides[side].keys ? x.sides[side].rows() : 0, 0};
            for (Index m = 0; m < n && x.sides[side].keys; m++) {
                const Index from = first_row(side, m);
                if (from < 0) continue;
                used[side].low = std::min(used[side].low, from);
                used[side].high =
                    std::max(used[side].high, from + (x.sides[side].keys - 1) * x.sides[side].key_step + 1);
            }
            for (Index c = floored(used[side].low, PANEL); c < used[side].high; c += PANEL)
                ::multiply<2>(n, x.width, Matrix{queries, queries_row, 1}, panels.get() + (columns[side] + c) * x.width,
                              PANEL, static_cast<const Real *>(nullptr), 0, products.get() + columns[side] + c, row);
        }
        if (changed) std::fill_n(changed.get(), (n + HIGH) * row, 0);
    }

    // Add the products to a row of logits of query m; `key` is the key of column 0.
    void add(Index m, const Row &logits, Index key) {
        if (!*this || first_row(INNER, m) < 0) return;
        for (Index side = 0; side < SIDES; side++) {
            const Real *from = products.get() + m * row + columns[side] + first_row(side, m);
            for (Index c = 0; c < x.sides[side].keys; c++)
                own.get()[places[side] + c] = from[c * x.sides[side].key_step];
        }
        const Index start = logits.start(), end = logits.end();
        const Real *along = own.get() + places[INNER];
        Real *to = terms.get() - start;
        std::fill(to + start, to + std::clamp(outside - key, start, end), 0);
        visit(logits, key, [&](Index j, Index cell, Index n, const Index *others) {
            Real other = 0;
            for (Index side = 0; side < INNER; side++) other += others[side] < 0 ? 0 : own.get()[others[side]];
            for (Index i = 0; i < n; i += LANES) store(to + j + i, load(along + cell + i) + other);
        });
        for (Index j = start; j < end; j += LANES) store(logits.at + j, load(logits.at + j) + load(to + j));
    }

    // Collect the gradients of the products of query m from a row of the logits' gradients.
    void take_changes(Index m, const Row &d_logits, Index key) {
        if (!*this || first_row(INNER, m) < 0) return;
        Real *const to = changes.get(), *const along = to + places[INNER];
        std::fill_n(to, count + LANES, 0);
        visit(d_logits, key, [&](Index j, Index cell, Index n, const Index *others) {
            Vec total{};
            for (Index i = 0; i < n; i += LANES) {
                Vec change = load(d_logits.at + j + i);
                if (n - i < LANES) change = numbers() < static_cast<std::int32_t>(n - i) ? change : Vec{};
                store(along + cell + i, load(along + cell + i) + change), total += change;
            }
            const Real all = sum(total);
            for (Index side = 0; side < INNER; side++)
                if (others[side] >= 0) to[others[side]] += all;
        });
        for (Index side = 0; side < SIDES; side++) {
            Real *into = changed.get() + m * row + columns[side] + first_row(side, m);
            for (Index c = 0; c < x.sides[side].keys; c++) into[c * x.sides[side].key_step] += to[places[side] + c];
        }
    }

    // Add the contribution of the block to the gradients of its queries and of the tables.
    void pull_back(Index n, const Real *queries, Index queries_row, Real *d_queries, Index d_queries_row, Real *d_table,
                   Index d_table_row) const {
        for (Index side = 0; *this && side < SIDES; side++) {
            const auto [low, high] = used[side];
            if (low >= high) continue;
            const Real *from = changed.get() + columns[side] + low;
            add_product(n, high - low, Matrix{from, row, 1}, table.of(rows[side] + low), table.row, width, d_queries,
                        d_queries_row);
            add_product(high - low, n, Matrix{from, 1, row}, queries, queries_row, width,
                        d_table + (rows[side] + low) * d_table_row, d_table_row);
        }
    }

private:
    // The row of a side's table for query m of the block and the first key along that side; -1 outside the grid.
    Index first_row(Index side, Index m) const {
        Index cell = begin + m - (x.queries - x.cells(&Side::queries));
        if (cell < 0) return -1;
        const Side &own = x.sides[side];
        if (!own.keys) return 0;
        for (Index other = INNER; other > side; other--) cell /= x.sides[other].queries;
        return (own.queries - 1 - cell % own.queries) * own.query_step;
    }

    // Visit the parts of a row that lie in one row of the grid: the column, the first cell, the number of keys, and the
    // columns of the products of all other sides, -1 for a missing side.
    template <class Visit>
    void visit(const Row &logits, Index key, Visit &&visit) const {
        Index j = std::max(logits.low, outside - key), at[INNER], others[INNER];
        const Index inner = x.sides[INNER].keys;
        if (j >= logits.high) return;
        Index rest = (key + j - outside) / inner;
        for (Index side = INNER - 1; side >= 0; side--) {
            const Index size = x.sides[side].keys;
            at[side] = size ? rest % size : 0, rest /= std::max<Index>(1, size);
            others[side] = size ? places[side] + at[side] : -1;
        }
        for (Index cell = (key + j - outside) % inner; j < logits.high; cell = 0) {
            const Index n = std::min(inner - cell, logits.high - j);
            visit(j, cell, n, others);
            j += n;
            for (Index side = INNER - 1; side >= 0 && x.sides[side].keys; side--) {
                others[side]++;
                if (++at[side] < x.sides[side].keys) break;
                others[side] -= x.sides[side].keys, at[side] = 0;
            }
        }
    }
};

}  // namespace
