// The forward pass: each block of queries with each block of keys; the logits never leave the cache.
#pragma once

#include "grid.hpp"
#include "key_side.hpp"
#include "pairs.hpp"

namespace {

// The scaled queries of a block that both passes use: those for the keys, and those for the table. Pairs of bfloat16
// are only scaled by a power of two, and their products with keys by the rest.
struct Queries {
    const Problem &x;
    const bool apart;     // whether the two differ
    const bool in_pairs;  // whether their products are computed by pairs
    const Real scale, rest;
    const Index row, own_row;
    Reals same, others;
    Rounded pairs;

    explicit Queries(const Problem &x)
        : x(x),
          apart((x.rel_k || x.axis_tables) && (x.rel_q || x.rel_scale != x.scale)),
          in_pairs(PAIRS && x.scale > 0 && !apart && !x.k_segments && !x.k_positions && !x.key_table && !x.on_grids()),
          scale(in_pairs ? std::exp2(std::round(std::log2(x.scale))) : x.scale),
          rest(in_pairs ? x.scale / scale : 1),
          row(padded(x.width)),
          own_row(padded(x.rel_width)) {}

    bool make(Index height) {
        same = zeros(height * row);
        if (apart) others = zeros(height * own_row);
        return same && (!apart || others) && (!in_pairs || pairs.make(height, row));
    }

    Index depth() const { return in_pairs ? (x.width + 1) / 2 : x.width; }

    const Real *rel_q() const { return apart ? others.get() : same.get(); }
    Index rel_q_row() const { return apart ? own_row : row; }

    void take(Index item, Index head, Index first, Index count) {
        const Array<const Stored> &from = x.rel_q ? x.rel_q : x.q;
        for (Index m = 0; m < count; m++) {
            const Stored *q = x.q.of(item, head, first + m);
            for (Index d = 0; d < x.width; d++) same.get()[m * row + d] = q[d] * scale;
            if (!apart) continue;
            const Stored *other = from.of(item, head, first + m);
            for (Index d = 0; d < x.rel_width; d++) others.get()[m * own_row + d] = other[d] * x.rel_scale;
        }
        if (in_pairs) pairs.take(same.get(), row, count, 0, row);
    }
};

// The keys of a head that a thread has packed: first … end - 1.
struct Packed {
    Index item = -1, head = -1, first = 0, end = 0;

    // Switch to other keys, if they fit; return the key up to which they are packed already.
    Index take(Index item, Index head, Seen wanted, Index room) {
        const Index low = floored(wanted.low, PANEL);  // whole panels, and whole vectors of labels
        const bool goes_on = item == this->item && head == this->head && first <= low && low <= end &&
                             std::max(end, wanted.high) - first <= room;
        if (!goes_on) *this = {item, head, low, low};
        const Index from = wanted.high <= end ? end : floored(end, PANEL);
        end = std::max(end, wanted.high);
        return from;
    }
};

// Whether rows of keys or values are not adjacent, and enough queries read them to pay for a compact copy.
inline bool lie_apart(const Problem &x, Index row, Index width) { return row != width && x.queries >= 2 * BLOCK; }

// How many keys a task may have, rounded up to whole panels.
inline Index room_for_keys(const Tasks &tasks) { return padded(tasks.most_keys() + PANEL, PANEL); }

// Write the result of a query, or combine it by the sums of weights with that of earlier tasks, which had other keys.
inline void write_result(const Problem &x, Index item, Index head, Index query, const Softmax &softmax,
                         const Real *from, bool goes_on) {
    Stored *to = x.out.of(item, head, query);
    Real *sums = x.sums ? x.sums.of(item, head, query) : nullptr;
    Real part = softmax.total == 0 ? 0 : 1 / (softmax.total * x.kept), most = softmax.most, log = softmax.log_total();
    if (!goes_on) {
        for (Index d = 0; d < x.value_width; d++) to[d] = from[d] * part;
    } else if (softmax.total != 0) {
        most = std::max(sums[0], softmax.most);
        const Real before = std::exp(sums[0] - most + sums[1]), now = std::exp(softmax.most - most + log);
        log = std::log(before + now), part *= now / (before + now);
        for (Index d = 0; d < x.value_width; d++) to[d] = to[d] * (before / (before + now)) + from[d] * part;
    } else {
        return;
    }
    if (sums) sums[0] = most, sums[1] = log;
    if (x.lse) *x.lse.of(item, head, query) = most + log;
}

// The memory of one thread.
struct Forward {
    static constexpr Index KEYS = 512;  // keys per block
    // zeros around weights, and extra columns
    static constexpr Index AROUND = std::max<Index>(2 * LANES, STRIP), EDGE = 2 * AROUND;
    static_assert(AROUND >= STRIP - 1, "skewed products of a strip read this many entries next to the weights");

    const Problem &x;
    Tasks &tasks;
    const Index room;                   // capacity for keys
    const Index value_row, logits_row;  // the steps between rows
    const Index most, height;           // the largest block, and this call's blocks
    Queries queries;
    const Span span;
    Relative relative;
    KeySide key_side;
    Sight sight;
    const Places &places;
    Grid grid;
    ByRow by_row;  // the weights for the values' table
    HeadRows head_keys, head_values;
    Rows values, rel_v;
    Reals keys, logits, outs;
    JoinedRows value_pairs;
    Rounded weights;  // of a strip
    Packed packed;
    Softmax softmax[ROWS];

    Forward(const Problem &x, Tasks &tasks)
        : x(x),
          tasks(tasks),
          room(room_for_keys(tasks)),
          value_row(padded(x.value_width)),
          logits_row(std::min(KEYS, padded(x.keys, PANEL)) + 2 * EDGE),
          most(rows_of_blocks(x)),
          height(std::min(most, padded(padded(x.queries, HIGH)))),
          queries(x),
          span(Span::of(x)),
          relative(x.rel_k, x.rel_bias, span, x.rel_width),
          key_side(x),
          sight(x),
          places(sight.places),
          grid(x),
          by_row(x, places),
          head_keys(HeadRows::keys(x)),
          head_values(HeadRows::values(x)) {
        relative.in_pairs = queries.in_pairs, relative.of_bias = 1 / queries.rest;
    }

    bool make() {
        if (queries.in_pairs && !(value_pairs.make(room, x.value_width) && weights.make(STRIP, logits_row)))
            return false;
        keys = reals(room * x.width);
        logits = reals((x.key_table ? height : STRIP) * logits_row);
        outs = reals(height * value_row);
        return keys && logits && outs && head_keys.make(x.keys) && head_values.make(x.keys) && queries.make(height) &&
               relative.make(height, std::max(logits_row, columns_anywhere(x)), static_cast<bool>(places)) &&
               key_side.make() && sight.make() && grid.make(height, logits_row) && (!x.rel_v || by_row.make(height)) &&
               (queries.in_pairs || values.make(room, x.value_width, static_cast<bool>(sight),
                                                lie_apart(x, head_values.row(), x.value_width))) &&
               (!x.rel_v || rel_v.make(x.rows, x.value_width, static_cast<bool>(places)));
    }

    void run() {
        for (Task task; tasks.take(task); tasks.finish(task)) {
            take_head(task);
            task.groups([&](Index group) { attend(task, group); });
        }
        if (queries.in_pairs) release_tiles();
    }

    // Pack the tables of a head, and those of its keys that some of the queries see.
    void take_head(const Task &task) {
        const auto [number, item, head, from, to, begins] = task;
        const Index entry = x.entry(item), own = head / x.group();
        relative.take(entry, head), key_side.take(entry, head), grid.take(entry, head), sight.take_keys(item);
        if (x.rel_v && rel_v.given != x.rel_v.of(entry, head))
            rel_v.take(x.rel_v.of(entry, head), x.rel_v.row, 0, 0, x.rows);
        const Seen seen = tasks.keys(task);
        if (seen.none()) return;
        const Index done = packed.take(item, own, seen, room);
        const Index there = done - packed.first, n = packed.end - done;
        const Stored *own_keys = head_keys.take(item, own, done, packed.end);
        const Stored *own_values = head_values.take(item, own, done, packed.end);
        const Index values_row = head_values.row();
        if (n > 0)
            pack_as(queries.in_pairs, own_keys + done * head_keys.row(), head_keys.row(), n, x.width,
                    keys.get() + there * queries.depth());
        if (queries.in_pairs)
            value_pairs.take(own_values, values_row, packed.first, done, packed.end);
        else
            values.take(own_values, values_row, packed.first, done, packed.end);
    }

    void attend(const Task &task, Index group) {
        if (queries.in_pairs) configure_tiles();
        const Task::Piece piece = tasks.piece(task, group);
        const Index item = task.item, head = task.head, first = piece.first;
        const Index count = piece.end - first, position = x.offset + first;
        sight.take_queries(item, first, count), key_side.take_queries(item, first, count);
        const Seen seen = sight.of(0, count, position, piece.low, piece.high);
        std::memset(outs.get(), 0, height * value_row * sizeof(Real));
        std::fill(softmax, softmax + count, Softmax());
        if (!seen.none()) {
            queries.take(item, head, first, count);
            relative.take_edges(queries.rel_q(), queries.rel_q_row(), count);
            places.multiply(relative, queries.rel_q(), queries.rel_q_row(), count);
            grid.multiply(queries.rel_q(), queries.rel_q_row(), first, count);
            if (by_row) by_row.clear(count);
            for (Index key = floored(seen.low, PANEL); key < seen.high; key += KEYS)
                process(task, first, count, position, key, std::min(KEYS, seen.high - key));
            if (by_row) by_row.mix(count, rel_v, outs.get(), value_row);
        }
        if (piece.goes_on && !tasks.wait(task)) return;
        for (Index m = 0; m < count; m++)
            write_result(x, item, head, first + m, softmax[m], outs.get() + m * value_row, piece.goes_on);
    }

    // Process a block of queries and a block of keys, `start … start + n - 1`.
    void process(const Task &task, Index first, Index count, Index position, Index start, Index n) {
        const Index item = task.item, head = task.head;
        const Index origin = relative.origin(start - (position + height - 1));
        Real *logits = this->logits.get() + EDGE;
        if (x.key_table)
            key_side.write(item, head, count, position, start, n, keys.get() + (start - packed.first) * x.width, logits,
                           logits_row);
        for (Index m = 0; m < count; m += STRIP) {
            const Index rows = std::min(STRIP, count - m), p = position + m;
            const Seen seen = sight.of(m, rows, p, start, start + n);
            const Index low = seen.low, high = seen.high;
            if (low >= high) continue;
            Real *s = logits + (x.key_table ? m * logits_row : 0);  // else they stay in the fastest cache
            const Index from = floored(low - start, PANEL), lowest = low - (p + rows - 1);
            const auto multiply = [&](const auto &own, const auto &rel_q) {
                if (relative && !places) relative.write(rel_q, m, rows, lowest, high - p, origin);
                const auto start_of = [&](Index j) {
                    MaskRow::fetch(x, item, head, first + m, rows, start + from + j);
                    return Start::of(relative, places, m, rows, start + from + j, p, origin, s + from + j, logits_row,
                                     static_cast<bool>(x.key_table));
                };
                multiply_panels(high - start - from, rows, queries.depth(), own,
                                keys.get() + (start + from - packed.first) * queries.depth(), start_of, s + from,
                                logits_row);
            };
            if (queries.in_pairs)
                multiply(queries.pairs.from(m), queries.pairs.from(m));
            else
                multiply(Matrix{queries.same.get() + m * queries.row, queries.row, 1},
                         Matrix{queries.rel_q() + m * queries.rel_q_row(), queries.rel_q_row(), 1});
            for (Index i = 0; i < rows; i++)
                weigh(item, head, first, position, m + i, start, low, high, s + i * logits_row);
            mix(m, {s, logits_row, rows, p, start, low - start, high - start});
        }
    }

    // Turn a row of products into weights, with zeros where the query sees nothing.
    void weigh(Index item, Index head, Index first, Index position, Index m, Index start, Index low, Index high,
               Real *s) {
        const Seen seen = Seen::of(x, position + m, position + m);
        const Row row{s, std::max(low, seen.low) - start, std::min(high, seen.high) - start};
        const Index around = x.rel_v ? AROUND : 0;
        Real factor = 1;
        if (row.low < row.high) {
            for (Index j = row.start(); queries.rest != 1 && j < row.end(); j += LANES)
                store(s + j, load(s + j) * queries.rest);
            grid.add(m, row, start);
            finish_logits(x, item, head, first + m, row, start);
            sight.hide(m, row, start);
            factor = softmax[m].take(row);
            Kept::of(x, item, head, first + m, start).drop(row);
            if (by_row) {
                if (factor != 1) by_row.scale(m, factor);
                by_row.add(m, row, start);
            }
        }
        row.clear_around(s + (low - start - around), s + (high - start + around));
        if (factor == 1) return;
        Real *out = outs.get() + m * value_row;
        for (Index d = 0; d < value_row; d += LANES) store(out + d, load(out + d) * factor);
    }

    // Add the values, multiplied by their weights.
    void mix(Index m, const Weights &weights) {
        const Index first = weights.start + weights.low, n = weights.high - weights.low;
        const Real *at = weights.at + weights.low;
        Real *out = outs.get() + m * value_row;
        if (queries.in_pairs) {
            this->weights.take(weights.at, logits_row, weights.count, weights.low, weights.high);
            value_pairs.mix(weights.count, weights.at, logits_row, this->weights.from(0), weights.low, first, first + n,
                            out, value_row);
        } else {
            add_product(weights.count, n, Matrix{at, logits_row, 1}, values.of(first), values.row, value_row, out,
                        value_row);
            values.add_lost(at, logits_row, weights.count, first, n, out, value_row);
        }
        if (x.rel_v && !by_row) weights.mix(span, rel_v.of(0), rel_v.row, value_row, out, value_row);
    }
};

inline bool forward(const Problem &x, Tasks &tasks) {
    Forward work(x, tasks);
    if (!work.make()) return false;
    work.run();
    return true;
}

}  // namespace
