// Keys on a grid: their logits get the product of the query with one row of a table for each axis.
//
// A block of queries is multiplied by the tables once. All keys of a grid row then share the terms of the outer axes;
// along the innermost axis, consecutive keys read consecutive products.
#pragma once

#include "relative.hpp"

namespace {

// Where queries and keys are on their grids.
struct Cells {
    static constexpr Index SIDES = Sizes::SIDES, INNER = SIDES - 1;

    const Problem &x;
    const Index outside;  // the number of keys before the grid
    Index begin = 0;      // the first query of a block

    explicit Cells(const Problem &x) : x(x), outside(x.on_grids() ? x.keys - x.cells(&Side::keys) : 0) {}

    // The place of query m of the block on the grid; negative before it.
    Index cell(Index m) const { return begin + m - (x.queries - x.cells(&Side::queries)); }

    // The place along a side of a cell.
    Index along(Index side, Index cell) const {
        for (Index other = INNER; other > side; other--) cell /= std::max<Index>(1, x.sides[other].queries);
        return cell % std::max<Index>(1, x.sides[side].queries);
    }

    // Visit the parts of a row that lie in one row of the grid: the column, the first cell, the number of keys, and the
    // places along all other sides, -1 for a missing side.
    template <class Visit>
    void visit(const Row &logits, Index key, Visit &&visit) const {
        Index j = std::max(logits.low, outside - key), at[INNER];
        const Index inner = x.sides[INNER].keys;
        if (j >= logits.high) return;
        Index rest = (key + j - outside) / inner;
        for (Index side = INNER - 1; side >= 0; side--) {
            const Index size = x.sides[side].keys;
            at[side] = size ? rest % size : -1, rest /= std::max<Index>(1, size);
        }
        for (Index cell = (key + j - outside) % inner; j < logits.high; cell = 0) {
            const Index n = std::min(inner - cell, logits.high - j);
            visit(j, cell, n, at);
            j += n;
            for (Index side = INNER - 1; side >= 0 && x.sides[side].keys; side--) {
                if (++at[side] < x.sides[side].keys) break;
                at[side] = 0;
            }
        }
    }
};

// The keys of the grid that queries on it see, if they see a part of it. Keys before the grid are seen by all.
struct Window : Cells {
    const bool here;

    explicit Window(const Problem &x) : Cells(x), here(x.windowed()) {}

    explicit operator bool() const { return here; }

    // Skip rows of the grid, at both ends, that none of these queries sees.
    void narrow(Index m, Index rows, Seen &there) const {
        if (!here || cell(m) < 0) return;
        Index outer = 0;
        while (!x.sides[outer].keys) outer++;
        const Index row = x.cells(&Side::keys) / x.sides[outer].keys;
        const Index low = seen(outer, cell(m)).low, high = seen(outer, cell(m + rows - 1)).high;
        if (there.low >= outside) there.low = std::max(there.low, outside + low * row);
        there.high = std::min(there.high, outside + std::max<Index>(0, high) * row);
    }

    // Hide the keys of a row that query m does not see; `key` is the key of column 0.
    void hide(Index m, const Row &row, Index key) const {
        const Index own = cell(m);
        if (!here || own < 0) return;
        Seen wanted[SIDES];
        for (Index side = 0; side < SIDES; side++) wanted[side] = seen(side, own);
        visit(row, key, [&](Index j, Index cell, Index n, const Index *places) {
            Seen inner = wanted[INNER];
            for (Index side = 0; side < INNER; side++)
                if (places[side] >= 0 && (places[side] < wanted[side].low || places[side] >= wanted[side].high))
                    inner = {0, 0};
            std::fill(row.at + j, row.at + j + std::clamp<Index>(inner.low - cell, 0, n), -INF);
            std::fill(row.at + j + std::clamp<Index>(inner.high - cell, 0, n), row.at + j + n, -INF);
        });
    }

private:
    // The range of keys along a side that the query of a cell sees.
    Seen seen(Index side, Index cell) const {
        const Side &own = x.sides[side];
        if (!own.hides()) return {0, own.keys};
        const Index step = own.key_step, place = along(side, cell) * own.query_step + own.offset;
        Index low = floored(place - own.before + step - 1, step) / step;
        if (!own.shifts) return {low, floored(place + own.after, step) / step + 1};
        const Index size = own.before + own.after + 1;
        low = std::clamp<Index>(low, 0, own.keys - size);
        return {low, low + size};
    }
};

struct Grid : Cells {
    const Index width;                                                     // of a padded row of tables
    Index columns[SIDES], rows[SIDES], places[SIDES], row = 0, count = 0;  // where each side begins
    Seen used[SIDES] = {};                                                 // columns that the queries of a block use
    Reals panels, products, own, terms, changes, changed;
    Rows table;
    Index entry = 0, head = -1;

    explicit Grid(const Problem &x) : Cells(x), width(padded(x.width)) {
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
        visit(logits, key, [&](Index j, Index cell, Index n, const Index *at) {
            Real other = 0;
            for (Index side = 0; side < INNER; side++) other += at[side] < 0 ? 0 : own.get()[places[side] + at[side]];
            for (Index i = 0; i < n; i += LANES) store(to + j + i, load(along + cell + i) + other);
        });
        for (Index j = start; j < end; j += LANES) store(logits.at + j, load(logits.at + j) + load(to + j));
    }

    // Collect the gradients of the products of query m from a row of the logits' gradients.
    void take_changes(Index m, const Row &d_logits, Index key) {
        if (!*this || first_row(INNER, m) < 0) return;
        Real *const to = changes.get(), *const along = to + places[INNER];
        std::fill_n(to, count + LANES, 0);
        visit(d_logits, key, [&](Index j, Index cell, Index n, const Index *at) {
            Vec total{};
            for (Index i = 0; i < n; i += LANES) {
                Vec change = load(d_logits.at + j + i);
                if (n - i < LANES) change = numbers() < static_cast<std::int32_t>(n - i) ? change : Vec{};
                store(along + cell + i, load(along + cell + i) + change), total += change;
            }
            const Real all = sum(total);
            for (Index side = 0; side < INNER; side++)
                if (at[side] >= 0) to[places[side] + at[side]] += all;
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
        const Side &own = x.sides[side];
        if (cell(m) < 0) return -1;
        return own.keys ? (own.queries - 1 - along(side, cell(m))) * own.query_step : 0;
    }
};

}  // namespace
