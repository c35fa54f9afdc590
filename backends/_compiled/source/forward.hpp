// The forward pass: blocks of queries against blocks of keys, whose logits never leave the cache.
#pragma once

#include "key_side.hpp"

namespace {

// What both passes have of the queries of a block, scaled: those that meet the keys, and those that meet the table.
struct Queries {
    const Problem &x;
    const bool apart;  // whether these are not the same
    const Index row, own_row;
    Floats same, others;

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

    const float *met() const { return apart ? others.get() : same.get(); }
    Index met_row() const { return apart ? own_row : row; }

    void take(Index item, Index head, Index first, Index count) {
        const Array<const float> &from = x.rel_q ? x.rel_q : x.q;
        for (Index m = 0; m < count; m++) {
            const float *q = x.q.of(item, head, first + m);
            for (Index d = 0; d < x.width; d++) same.get()[m * row + d] = q[d] * x.scale;
            if (!apart) continue;
            const float *other = from.of(item, head, first + m);
            for (Index d = 0; d < x.rel_width; d++) others.get()[m * own_row + d] = other[d] * x.rel_scale;
        }
    }
};

// Which relative positions there are in a call.
inline Index lowest(const Problem &x) { return 1 - x.offset - x.queries; }
inline Index highest(const Problem &x) { return x.keys - 1 - x.offset; }

// Add products of PANEL keys with the queries' table, if any, to what is of the keys' table; return where that is.
inline const float *add_to_logits(Index rows, const float *from, Index from_row, float *s, Index s_row) {
    for (Index i = 0; from && i < rows; i++)
        for (Index j = 0; j < PANEL; j += LANES)
            store(s + i * s_row + j, load(s + i * s_row + j) + load(from + i * from_row + j));
    return s;
}

// All that one thread has while it works.
struct Forward {
    static constexpr Index KEYS = 512;                             // of a block
    static constexpr Index AROUND = 2 * LANES, EDGE = 2 * AROUND;  // zeros beside a row of weights, and room

    const Problem &x;
    const Index value_row, logits_row;  // steps from row to row
    const Index most, height;           // rows of a block, and of this call's
    Queries queries;
    const Span span;
    Relative relative;
    KeySide key_side;
    Rows values, rel_v;
    Floats keys, logits, outs;
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
          key_side(x) {}

    bool make() {
        keys = floats(padded(x.keys, PANEL) * x.width);
        logits = floats(height * logits_row);
        outs = floats(height * value_row);
        return keys && logits && outs && queries.make(height) &&
               relative.make(height, logits_row, lowest(x), highest(x)) && key_side.make() &&
               values.make(x.keys, x.value_width) && (!x.rel_v || rel_v.make(x.rows, x.value_width));
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
        relative.take(head), key_side.take(head);
        if (x.rel_v && (rel_v_head < 0 || (x.rel_v.head && rel_v_head != head)))
            rel_v.take(x.rel_v.of(0, rel_v_head = head), x.rel_v.row, x.rows, x.value_width);
        const Index own = head / x.group();
        const Seen seen = Seen::of(x, x.offset + first_query, x.offset + end_query - 1);
        if (seen.none()) return;
        if (item == key_item && own == key_head && packed.low <= seen.low && seen.high <= packed.high) return;
        key_item = item, key_head = own, packed = seen;
        const Index count = seen.high - seen.low;
        pack(x.k.of(item, own, seen.low), x.k.row, count, x.width, keys.get());
        values.take(x.v.of(item, own, seen.low), x.v.row, count, x.value_width);
    }

    void attend(Index item, Index head, Index first) {
        const Index count = std::min(most, x.queries - first), position = x.offset + first;
        const Seen seen = Seen::of(x, position, position + count - 1);
        std::memset(outs.get(), 0, height * value_row * sizeof(float));
        std::fill(softmax, softmax + count, Softmax());
        if (!seen.none()) {
            queries.take(item, head, first, count);
            relative.take_edges(queries.met(), queries.met_row(), count);
            const Index start = packed.low + floored(seen.low - packed.low, PANEL);
            for (Index key = start; key < seen.high; key += KEYS)
                meet(item, head, first, count, position, key, std::min(KEYS, seen.high - key));
        }
        for (Index m = 0; m < count; m++) {
            const float total = softmax[m].total * x.kept, part = total == 0 ? 0.0f : 1.0f / total;
            float *to = x.out.of(item, head, first + m);
            const float *from = outs.get() + m * value_row;
            for (Index d = 0; d < x.value_width; d++) to[d] = from[d] * part;
            if (x.lse) *x.lse.of(item, head, first + m) = softmax[m].log_sum();
        }
    }

    // A block of queries meets a block of keys, `start … start + n - 1`.
    void meet(Index item, Index head, Index first, Index count, Index position, Index start, Index n) {
        const Index origin = relative.origin(start - (position + height - 1));
        float *logits = this->logits.get() + EDGE;
        if (x.key_table) key_side.write(item, head, count, position, start, n, logits, logits_row);
        for (Index m = 0; m < count; m += HIGH) {
            const Index rows = std::min<Index>(HIGH, count - m), p = position + m;
            const Seen seen = Seen::of(x, p, p + rows - 1);
            const Index low = std::max(start, seen.low), high = std::min(start + n, seen.high);
            if (low >= high) continue;
            if (relative)
                relative.multiply(queries.met(), queries.met_row(), m, rows, low - (p + rows - 1), high - p, origin);
            float *s = logits + m * logits_row;
            for (Index j = floored(low - start, PANEL); j < high - start; j += PANEL) {
                const float *from = relative.at(m, start + j, p, origin);
                if (x.key_table) from = add_to_logits(rows, from, relative.row - 1, s + j, logits_row);
                multiply<2>(rows, x.width, {queries.same.get() + m * queries.row, queries.row, 1},
                            keys.get() + (start + j - packed.low) * x.width, PANEL, from,
                            x.key_table ? logits_row : relative.row - 1, s + j, logits_row);
            }
            for (Index i = 0; i < rows; i++) weigh(item, head, first, position, m + i, start, low, high);
            mix(m, {s, logits_row, rows, p, start, low - start, high - start});
        }
    }

    // Turn a row of products into weights, zeros where it sees nothing.
    void weigh(Index item, Index head, Index first, Index position, Index m, Index start, Index low, Index high) {
        const Seen seen = Seen::of(x, position + m, position + m);
        float *s = logits.get() + EDGE + m * logits_row;
        const Row row{s, std::max(low, seen.low) - start, std::min(high, seen.high) - start};
        const Index around = x.rel_v ? AROUND : 0;
        float factor = 1;
        if (row.low < row.high) {
            finish_logits(x, row, MaskRow::of(x, item, head, first + m), start);
            factor = softmax[m].take(row);
            Kept::of(x, item, head, first + m, start).drop(row);
        }
        row.clear_around(s + low - start - around, s + high - start + around);
        if (factor == 1.0f) return;
        float *out = outs.get() + m * value_row;
        for (Index d = 0; d < value_row; d += LANES) store(out + d, load(out + d) * factor);
    }

    // Add the values, times their weights.
    void mix(Index m, const Weights &weights) {
        const float *v = values.at + (weights.start + weights.low - packed.low) * values.row;
        float *out = outs.get() + m * value_row;
        add_product(weights.count, weights.high - weights.low, {weights.at + weights.low, logits_row, 1}, v, values.row,
                    value_row, out, value_row);
        if (x.rel_v) weights.mix(span, rel_v.at, rel_v.row, value_row, out, value_row);
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
