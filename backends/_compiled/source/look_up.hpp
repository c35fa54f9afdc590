// Queries and keys at arbitrary positions: the column of a product with a table is looked up for each pair.
#pragma once

#include "grid.hpp"
#include "labels.hpp"

namespace {

constexpr Index TABLE = Index{1} << 30;  // an upper bound of the reach of tables whose rows are looked up

// How many columns of relative positions arbitrary positions need in addition to those of a block of keys.
inline Index columns_anywhere(const Problem &x) { return x.k_positions ? x.rows + PANEL : 0; }

// The relative positions that a block of queries distinguishes; lower and higher ones are clipped to these.
struct Reach {
    Index low = 0, high = 0;

    static Reach of(const Problem &x, Bounds queries, Bounds keys) {
        const Index low = std::max<Index>(-x.before, Index{keys.low} - queries.high);
        const Index high = std::max(low, std::min<Index>(x.after, Index{keys.high} - queries.low));
        const Index before = -x.left - 1, after = x.rows - x.left;  // one step beyond the table
        return {std::clamp(low, before, after), std::clamp(high, before, after)};
    }

    Index count() const { return high - low + 1; }

    // The columns of a query and LANES keys.
    Ints columns(std::int32_t query, const std::int32_t *keys) const {
        const auto held = [](Ints x, Index low, Index high) {
            const Ints least = Ints{} + static_cast<std::int32_t>(low), most = Ints{} + static_cast<std::int32_t>(high);
            x = x < least ? least : x;
            return x > most ? most : x;
        };
        const Index least = std::max(Bounds::LEAST, query - TABLE), most = std::min(Bounds::MOST, query + TABLE);
        // clipped, so that the difference from the query does not wrap
        const Ints near = held(load_ints(keys), least, most);
        return held(near - query, low, high) - static_cast<std::int32_t>(low);
    }

    // Whether all keys are clipped to the lowest, or the highest, position.
    bool all_low(std::int32_t query, Bounds keys) const { return Index{keys.high} - query <= low; }
    bool all_high(std::int32_t query, Bounds keys) const { return Index{keys.low} - query >= high; }

    // Whether a whole vector of keys reads consecutive columns.
    bool holds(std::int32_t query, Bounds keys) const {
        const Index first = Index{keys.low} - query;
        return keys.rises && keys.high - keys.low == LANES - 1 && low <= first && first + LANES - 1 <= high;
    }
};

// The positions of an item's keys and of a block of queries, unless they are consecutive.
struct Places : Labels {
    Reach reach;

    explicit Places(const Problem &x) : Labels(x, x.q_positions, x.k_positions, x.q_limits) {}

    void take_queries(Index item, Index first, Index count) {
        Labels::take_queries(item, first);
        if (*this) reach = Reach::of(x, Bounds::of(queries, count), all);
    }

    // Write the products of the block's queries with a table, from the lowest relative position to the highest.
    void multiply(Relative &relative, const Real *queries, Index queries_row, Index count) const {
        if (!*this || !relative) return;
        if (!relative.table) count = 1;  // a bias is the same for all queries
        for (Index m = 0; m < count; m += HIGH)
            relative.multiply(queries, queries_row, m, std::min<Index>(HIGH, count - m), reach.low, reach.high + 1,
                              relative.origin(reach.low));
    }

    // Write, or add, the products at the columns of PANEL keys from `key` on.
    void look_up(const Relative &relative, Index m, Index rows, Index key, Real *to, Index to_row, bool adds) const {
        const Index origin = relative.origin(reach.low), step = relative.table ? relative.row : 0;
        for (Index i = m; i < m + rows; i++, to += to_row) {
            const Real *from = relative.products.get() + (i * step + reach.low - origin);
            for (Index j = 0; j < PANEL && key + j < x.keys; j += LANES) {
                const Bounds there = vectors[(key + j) / LANES];
                const Vec before = adds ? load(to + j) : Vec{};
                if (reach.all_low(queries[i], there)) {
                    store(to + j, splat(from[0]));
                } else if (reach.all_high(queries[i], there)) {
                    store(to + j, splat(from[reach.high - reach.low]));
                } else if (reach.holds(queries[i], there)) {
                    store(to + j, load(from + (there.low - Index{queries[i]} - reach.low)));
                } else {
                    const Ints c = reach.columns(queries[i], keys + key + j);
                    for (int lane = 0; lane < LANES; lane++) to[j + lane] = from[c[lane]];
                }
                if (adds) store(to + j, load(to + j) + before);
            }
        }
    }
};

// The labels that hide keys in addition to the pattern, or instead of it.
struct Sight {
    const Problem &x;
    Labels segments;
    Places places;
    Padding padding;
    Window window;

    explicit Sight(const Problem &x)
        : x(x), segments(x, x.q_segments, x.k_segments), places(x), padding(x), window(x) {}

    explicit operator bool() const { return segments || places || window; }

    bool make() { return segments.make() && places.make() && padding.make(); }
    void take_keys(Index item) { segments.take_keys(item), places.take_keys(item), padding.take_keys(item); }
    void take_queries(Index item, Index first, Index count) {
        segments.take_queries(item, first), places.take_queries(item, first, count), window.begin = first;
    }

    // The keys of low … high - 1 that some queries of a block may see; the first query has the position p.
    Seen of(Index m, Index rows, Index p, Index low, Index high) const {
        Seen seen = Seen::of(x, p, p + rows - 1);
        seen = {std::max(low, seen.low), std::min(high, seen.high)};
        padding.narrow(seen);
        segments.narrow(m, rows, seen), places.narrow(m, rows, seen), window.narrow(m, rows, seen);
        return seen;
    }

    void hide(Index m, const Row &row, Index first) const {
        segments.hide(m, row, first), places.hide(m, row, first), window.hide(m, row, first);
    }
};

// The numbers that the products of a block are added to, and the step between their rows.
struct Start {
    const Real *at;
    Index row;

    // The start for some queries, the first at position p, and PANEL keys from `key` on. Products at arbitrary
    // positions, and those that `adds` asks for, are added to the numbers in `to`.
    static Start of(const Relative &relative, const Places &places, Index m, Index rows, Index key, Index p,
                    Index origin, Real *to, Index to_row, bool adds = false) {
        if (places && relative) {
            places.look_up(relative, m, rows, key, to, to_row, adds);
            return {to, to_row};
        }
        const Start from{relative.at(m, key, p, origin), relative.row - 1};
        if (!adds) return from;
        for (Index i = 0; from.at && i < rows; i++)
            for (Index j = 0; j < PANEL; j += LANES)
                store(to + i * to_row + j, load(to + i * to_row + j) + load(from.at + i * from.row + j));
        return {to, to_row};
    }
};

// For each query of a block, the sum of the weights of all keys that use a row of a table.
struct ByRow {
    const Problem &x;
    const Places &places;
    const bool alike;  // whether one sum for all queries together is enough
    Reals at;
    Index row = 0;

    ByRow(const Problem &x, const Places &places, bool alike = false) : x(x), places(places), alike(alike) {}

    explicit operator bool() const { return static_cast<bool>(at); }

    bool make(Index height) {
        if (!places) return true;
        row = padded(x.rows + 2 + HIGH) + LANES;  // the last vector holds columns that are not used
        at = reals(((alike ? 0 : height) + HIGH) * row);
        return static_cast<bool>(at);
    }

    void clear(Index count) {
        for (Index m = 0; m < (alike ? 1 : count + HIGH); m++) std::fill_n(of(m), places.reach.count() + HIGH, 0);
    }

    void scale(Index m, Real factor) {
        for (Index c = 0; c < places.reach.count(); c += LANES) store(of(m) + c, load(of(m) + c) * factor);
    }

    // Add a row of weights to the sums of query m; `first` is the key of column 0.
    void add(Index m, const Row &weights, Index first) {
        const Reach reach = places.reach;
        const std::int32_t p = places.queries[m], last = static_cast<std::int32_t>(reach.count() - 1);
        Real *to = of(m);
        Vec low{}, high{};
        for (Index j = weights.start(); j < weights.end(); j += LANES) {
            const Bounds there = places.vectors[(first + j) / LANES];
            const Vec own = load(weights.at + j);
            if (reach.all_low(p, there)) {
                low += own;
            } else if (reach.all_high(p, there)) {
                high += own;
            } else if (reach.holds(p, there)) {
                Real *sums = to + (there.low - Index{p} - reach.low);
                store(sums, load(sums) + own);
            } else {  // many keys add to both ends, and each addition would wait for the previous one: skip these
                const Ints c = reach.columns(p, places.keys + first + j);
                const Ints lowest = c == 0, highest = (c == last) & ~lowest;
                low += lowest ? own : Vec{};
                high += highest ? own : Vec{};
                const Ints place = lowest | highest ? numbers() + static_cast<std::int32_t>(row - LANES) : c;
                for (int lane = 0; lane < LANES; lane++) to[place[lane]] += own[lane];
            }
        }
        to[0] += sum(low);
        to[last] += sum(high);
    }

    // Add the table's rows, multiplied by the sums, to the outputs.
    void mix(Index count, const Rows &table, Real *out, Index out_row) const {
        const auto add = [&](Index first, Index n, const Real *weights) {
            if (n <= 0) return;
            add_product(count, n, Matrix{weights, row, 1}, table.of(first), table.row, padded(table.width), out,
                        out_row);
            table.add_lost(weights, row, count, first, n, out, out_row);
        };
        add(first_row(), end_row() - first_row(), column(first_row()));
        for (int side = 0; side < 2; side++)
            if (is_beyond(side)) add(edge(side), 1, of(0) + last(side));
    }

    // Add the queries' rows, multiplied by the sums, to the gradients of the table's rows.
    void spread(Index count, const Real *from, Index from_row, Index width, Real *table, Index table_row) const {
        if (first_row() < end_row())
            add_product(end_row() - first_row(), count, Matrix{column(first_row()), 1, row}, from, from_row, width,
                        table + first_row() * table_row, table_row);
        for (int side = 0; side < 2; side++)
            for (Index m = 0; m < count && is_beyond(side); m++)
                Weights::add_row(beyond(m, side), from + m * from_row, width, table + edge(side) * table_row);
    }

    void add_to(Real *bias, Index count) const {
        for (Index m = 0; m < (alike ? 1 : count); m++) {
            for (Index c = first_row(); c < end_row(); c++) bias[c] += column(c)[m * row];
            for (int side = 0; side < 2; side++)
                if (is_beyond(side)) bias[edge(side)] += beyond(m, side);
        }
    }

private:
    Real *of(Index m) const { return at.get() + (alike ? 0 : m * row); }
    const Real *column(Index c) const { return at.get() + (c - x.left - places.reach.low); }

    // The rows of the table that are used, and its effective edges.
    Index first_row() const { return std::max<Index>(0, places.reach.low + x.left); }
    Index end_row() const { return std::min(x.rows, places.reach.high + x.left + 1); }
    Index edge(int side) const { return side ? x.rows - 1 : 0; }
    bool is_beyond(int side) const {
        return x.clip && (side ? places.reach.high == x.rows - x.left : places.reach.low == -x.left - 1);
    }
    Index last(int side) const { return side ? places.reach.count() - 1 : 0; }
    Real beyond(Index m, int side) const { return of(m)[last(side)]; }
};

}  // namespace
