// The forward pass: blocks of queries against blocks of keys, whose logits never leave the cache.
#pragma once

#include "key_side.hpp"

namespace {

// What both passes have of the queries of a block, scaled: those that meet the keys, and those that meet the table.
struct Queries {
    const Problem &x;
    const bool apart;  // whether these are not the same
    const Index row, own_row;
    Reals same, others;

    explicit Queries(const Problem &x)
        : x(x),
          apart(x.rel_k && (x.rel_q || x.rel_scale != x.scale)),
          row(padded(x.width)),
          own_row(padded(x.rel_width)) {}

    bool make(Index height) {
        same = zeros(height * row);
        if (apart) others = zeros(height * own_row);
        return same && (!apart || others);
    }

    const Real *met() const { return apart ? others.get() : same.get(); }
    Index met_row() const { return apart ? own_row : row; }

    void take(Index item, Index head, Index first, Index count) {
        const Array<const Real> &from = x.rel_q ? x.rel_q : x.q;
        for (Index m = 0; m < count; m++) {
            const Real *q = x.q.of(item, head, first + m);
            for (Index d = 0; d < x.width; d++) same.get()[m * row + d] = q[d] * x.scale;
            if (!apart) continue;
            const Real *other = from.of(item, head, first + m);
            for (Index d = 0; d < x.rel_width; d++) others.get()[m * own_row + d] = other[d] * x.rel_scale;
        }
    }
};

// All that one thread has while it works.
struct Forward {
    static constexpr Index KEYS = 512;                                             // of a block
    static constexpr Index AROUND = std::max(2 * LANES, HIGH), EDGE = 2 * AROUND;  // zeros beside weights, and room
    static_assert(AROUND >= HIGH - 1, "skewed products of HIGH rows read so many entries beside the weights");

    const Problem &x;
    const Index value_row, logits_row;  // steps from row to row
    const Index most, height;           // rows of a block, and of this call's
    Queries queries;
    const Span span;
    Relative relative;
    KeySide key_side;
    Sight sight;
    const Places &places;
    ByRow by_row;  // the weights that meet values' table
    Rows values, rel_v;
    Reals keys, logits, outs;
    Index key_item = -1, key_head = -1, rel_v_head = -1;
    Seen packed{0, 0};
    Softmax softmax[ROWS];

    explicit Forward(const Problem &x)
        : x(x),
          value_row(padded(x.value_width)),
          logits_row(std::min(KEYS, padded(x.keys, PANEL)) + 2 * EDGE),
          most(rows_of_blocks(x)),
          height(std::min(most, padded(padded(x.queries, HIGH)))),
          queries(x),
          span(Span::of(x)),
          relative(x.rel_k, x.bias, span, x.rel_width),
          key_side(x),
          sight(x),
          places(sight.places),
          by_row(x, places) {}

    bool make() {
        keys = reals(padded(x.keys, PANEL) * x.width);
        logits = reals(height * logits_row);
        outs = reals(height * value_row);
        return keys && logits && outs && queries.make(height) &&
               relative.make(height, std::max(logits_row, columns_anywhere(x))) && key_side.make() && sight.make() &&
               (!x.rel_v || by_row.make(height)) && values.make(x.keys, x.value_width, static_cast<bool>(sight)) &&
               (!x.rel_v || rel_v.make(x.rows, x.value_width, static_cast<bool>(places)));
    }

    void run(Index first, Index last) {
        const Index count = blocks(x);
        for (Index task = first; task < last;) {
            const Index pair = task / count, start = task % count;
            const Index stop = std::min(count, start + last - task);
            const Index item = pair / x.heads, head = pair % x.heads;
            take_head(item, head, start * most, std::min(x.queries, stop * most));
            for (Index block = start; block < stop; block++) attend(item, head, block * most);
            task += stop - start;
        }
    }

    // Pack what belongs to a head: of the keys, those that some of the queries see.
    void take_head(Index item, Index head, Index first_query, Index end_query) {
        relative.take(head), key_side.take(head), sight.take_keys(item);
        if (x.rel_v && (rel_v_head < 0 || (x.rel_v.head && rel_v_head != head)))
            rel_v.take(x.rel_v.of(0, rel_v_head = head), x.rel_v.row, x.rows);
        const Index own = head / x.group();
        Seen seen = Seen::of(x, x.offset + first_query, x.offset + end_query - 1);
        seen.low = floored(seen.low, LANES);  // as labels are taken
        if (seen.none()) return;
        if (item == key_item && own == key_head && packed.low <= seen.low && seen.high <= packed.high) return;
        key_item = item, key_head = own, packed = seen;
        const Index count = seen.high - seen.low;
        pack(x.k.of(item, own, seen.low), x.k.row, count, x.width, keys.get());
        values.take(x.v.of(item, own, seen.low), x.v.row, count);
    }

    void attend(Index item, Index head, Index first) {
        const Index count = std::min(most, x.queries - first), position = x.offset + first;
        sight.take_queries(item, first, count), key_side.take_queries(item, first, count);
        const Seen seen = sight.of(0, count, position, 0, x.keys);
        std::memset(outs.get(), 0, height * value_row * sizeof(Real));
        std::fill(softmax, softmax + count, Softmax());
        if (!seen.none()) {
            queries.take(item, head, first, count);
            relative.take_edges(queries.met(), queries.met_row(), count);
            places.multiply(relative, queries.met(), queries.met_row(), count);
            if (by_row) by_row.clear(count);
            const Index start = packed.low + floored(seen.low - packed.low, PANEL);
            for (Index key = start; key < seen.high; key += KEYS)
                meet(item, head, first, count, position, key, std::min(KEYS, seen.high - key));
            if (by_row) by_row.mix(count, rel_v, outs.get(), value_row);
        }
        for (Index m = 0; m < count; m++) {
            const Real total = softmax[m].total * x.kept, part = total == 0 ? 0 : 1 / total;
            Real *to = x.out.of(item, head, first + m);
            const Real *from = outs.get() + m * value_row;
            for (Index d = 0; d < x.value_width; d++) to[d] = from[d] * part;
            if (x.lse) *x.lse.of(item, head, first + m) = softmax[m].log_sum();
        }
    }

    // A block of queries meets a block of keys, `start … start + n - 1`.
    void meet(Index item, Index head, Index first, Index count, Index position, Index start, Index n) {
        const Index origin = relative.origin(start - (position + height - 1));
        Real *logits = this->logits.get() + EDGE;
        if (x.key_table) key_side.write(item, head, count, position, start, n, logits, logits_row);
        for (Index m = 0; m < count; m += HIGH) {
            const Index rows = std::min<Index>(HIGH, count - m), p = position + m;
            const auto [low, high] = sight.of(m, rows, p, start, start + n);
            if (low >= high) continue;
            if (relative && !places)
                relative.multiply(queries.met(), queries.met_row(), m, rows, low - (p + rows - 1), high - p, origin);
            Real *s = logits + m * logits_row;
            for (Index j = floored(low - start, PANEL); j < high - start; j += PANEL) {
                const Start from = Start::of(relative, places, m, rows, start + j, p, origin, s + j, logits_row,
                                             static_cast<bool>(x.key_table));
                multiply<2>(rows, x.width, {queries.same.get() + m * queries.row, queries.row, 1},
                            keys.get() + (start + j - packed.low) * x.width, PANEL, from.at, from.row, s + j,
                            logits_row);
            }
            for (Index i = 0; i < rows; i++) weigh(item, head, first, position, m + i, start, low, high);
            mix(m, {s, logits_row, rows, p, start, low - start, high - start});
        }
    }

    // Turn a row of products into weights, zeros where it sees nothing.
    void weigh(Index item, Index head, Index first, Index position, Index m, Index start, Index low, Index high) {
        const Seen seen = Seen::of(x, position + m, position + m);
        Real *s = logits.get() + EDGE + m * logits_row;
        const Row row{s, std::max(low, seen.low) - start, std::min(high, seen.high) - start};
        const Index around = x.rel_v ? AROUND : 0;
        Real factor = 1;
        if (row.low < row.high) {
            finish_logits(x, row, MaskRow::of(x, item, head, first + m), start);
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

    // Add the values, times their weights.
    void mix(Index m, const Weights &weights) {
        const Index first = weights.start + weights.low - packed.low, n = weights.high - weights.low;
        const Real *at = weights.at + weights.low;
        Real *out = outs.get() + m * value_row;
        add_product(weights.count, n, {at, logits_row, 1}, values.at + first * values.row, values.row, value_row, out,
                    value_row);
        values.add_lost(at, logits_row, weights.count, first, n, out, value_row);
        if (x.rel_v && !by_row) weights.mix(span, rel_v.at, rel_v.row, value_row, out, value_row);
    }
};

inline bool forward(const Problem &x, Index part, Index parts) {
    const Index tasks = x.items * x.heads * blocks(x);
    Forward work(x);
    if (!work.make()) return false;
    work.run(tasks * part / parts, tasks * (part + 1) / parts);
    return true;
}

}  // namespace
