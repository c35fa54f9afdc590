// The forward pass: blocks of queries against blocks of keys, whose logits never leave the cache.
#pragma once

#include <cstdlib>
#include <memory>

#include "rows.hpp"

namespace {

constexpr Index ROWS = 48;                             // queries of a block …
constexpr Index KEYS = 512;                            // … and keys
constexpr Index MARGIN = 64;                           // around a row of weights, zeros that skewed products read

struct Free {
    void operator()(float *p) const { std::free(p); }
};

using Floats = std::unique_ptr<float, Free>;

inline Floats floats(Index count) {
    const Index bytes = padded((count + PANEL) * static_cast<Index>(sizeof(float)), 64);
    return Floats(static_cast<float *>(std::aligned_alloc(64, static_cast<std::size_t>(bytes))));
}

// Which keys some queries of an item see.
struct Seen {
    Index low, high;

    static Seen of(const Problem &x, Index first_position, Index last_position) {
        Index low = first_position - x.before, high = last_position + x.after + 1;
        if (x.block) {
            low = std::max(low, floored(first_position, x.block) - x.behind * x.block);
            high = std::min(high, floored(last_position, x.block) + x.block);
        }
        return {std::max<Index>(0, low), std::min(x.keys, high)};
    }

    bool none() const { return low >= high; }
};

// A table, of which the rows `first … end - 1` may be met, in panels.
struct Packed {
    Index first = 0, end = 0;
    Floats panels, bias;
    Index head = -1;

    bool make(const Problem &x) {
        const Index low = std::max(-x.before, 1 - x.offset - x.queries) + x.left;
        const Index high = std::min(x.after, x.keys - 1 - x.offset) + x.left + 1;
        first = std::clamp<Index>(low, 0, x.rows);
        end = std::clamp<Index>(high, first, x.rows);
        if (x.rel_k) panels = floats(padded(end - first, PANEL) * x.rel_width);
        bias = floats(padded(end - first, PANEL) + PANEL);
        return (!x.rel_k || panels) && bias;
    }

    void take(const Problem &x, Index of) {
        if (head == of || (head >= 0 && x.rel_k.head == 0 && x.bias.head == 0)) return;
        head = of;
        if (x.rel_k) pack(x.rel_k.of(0, of, first), x.rel_k.row, end - first, x.rel_width, panels.get());
        if (x.bias) std::memcpy(bias.get(), x.bias.of(0, of) + first, (end - first) * sizeof(float));
    }
};

inline Index blocks(const Problem &x) { return (x.queries + ROWS - 1) / ROWS; }

// All that one thread has while it works.
struct Forward {
    const Problem &x;
    const bool relative;     // whether logits depend on relative positions
    const bool own_queries;  // whether other queries meet the table than meet the keys
    const Index value_row, logits_row, products_row;  // steps from row to row
    const Index height;      // rows of a block
    Packed table;
    Floats keys, values, queries, table_queries, logits, products, outs, rel_v;
    Index key_item = -1, key_head = -1, rel_v_head = -1;
    Seen packed{0, 0};
    bool values_finite = true;
    float edges[2][ROWS];
    Softmax softmax[ROWS];

    explicit Forward(const Problem &x)
        : x(x), relative(x.rel_k || x.bias), own_queries(x.rel_k && (x.rel_q || x.rel_scale != x.scale)),
          value_row(padded(x.value_width)), logits_row(std::min(KEYS, padded(x.keys, PANEL)) + 2 * MARGIN),
          products_row(logits_row + ROWS + 2 * PANEL), height(std::min(ROWS, padded(x.queries, HIGH))) {}

    bool make() {
        if (relative && !table.make(x)) return false;
        keys = floats(padded(x.keys, PANEL) * x.width);
        queries = floats(height * x.width);
        logits = floats(height * logits_row);
        outs = floats(height * value_row);
        if (relative) products = floats(height * products_row);
        if (own_queries) table_queries = floats(height * x.rel_width);
        if (value_row != x.value_width) values = floats(x.keys * value_row);
        if (x.rel_v && value_row != x.value_width) rel_v = floats(x.rows * value_row);
        return keys && queries && logits && outs && (!relative || products) && (!own_queries || table_queries) &&
               (value_row == x.value_width || (values && (!x.rel_v || rel_v)));
    }

    void run(Index first, Index last) {
        const Index count = blocks(x);
        for (Index task = first; task < last;) {
            const Index pair = task / count, start = task % count;
            const Index stop = std::min(count, start + last - task);
            const Index item = pair / x.heads, head = pair % x.heads;
            take_keys(item, head, start * ROWS, std::min(x.queries, stop * ROWS));
            if (relative) table.take(x, head);
            if (rel_v && (rel_v_head < 0 || (x.rel_v.head && rel_v_head != head)))
                copy(x.rel_v.of(0, head), x.rel_v.row, x.rows, rel_v.get(), rel_v_head = head);
            for (Index block = start; block < stop; block++) attend(item, head, block * ROWS);
            task += stop - start;
        }
    }

    void copy(const float *from, Index row, Index rows, float *to, Index) const {
        for (Index j = 0; j < rows; j++)
            std::memcpy(to + j * value_row, from + j * row, x.value_width * sizeof(float));
    }

    // Pack the keys of a head that some of the queries see.
    void take_keys(Index item, Index head, Index first_query, Index end_query) {
        const Index own = head / x.group(), p = x.offset;
        const Seen seen = Seen::of(x, p + first_query, p + end_query - 1);
        if (seen.none()) return;
        if (item == key_item && own == key_head && packed.low <= seen.low && seen.high <= packed.high) return;
        key_item = item, key_head = own, packed = seen;
        pack(x.k.of(item, own, seen.low), x.k.row, seen.high - seen.low, x.width, keys.get());
        if (values) copy(x.v.of(item, own, seen.low), x.v.row, seen.high - seen.low, values.get(), 0);
        if (x.seen || x.added) values_finite = finite(x.v.of(item, own, seen.low), seen.high - seen.low);
    }

    bool finite(const float *v, Index rows) const {
        float nothing = 0;
        for (Index j = 0; j < rows; j++) {
            Vec zeros{};
            Index d = 0;
            for (; d + LANES <= x.value_width; d += LANES) zeros += load(v + j * x.v.row + d) * 0.0f;
            for (; d < x.value_width; d++) nothing += v[j * x.v.row + d] * 0.0f;
            nothing += sum(zeros);
        }
        return nothing == 0;
    }

    void attend(Index item, Index head, Index first) {
        const Index count = std::min(ROWS, x.queries - first), position = x.offset + first;
        const Seen seen = Seen::of(x, position, position + count - 1);
        std::memset(outs.get(), 0, height * value_row * sizeof(float));
        std::fill(softmax, softmax + ROWS, Softmax());
        if (!seen.none()) {
            take_queries(item, head, first, count);
            const Index start = packed.low + floored(seen.low - packed.low, PANEL);
            for (Index key = start; key < seen.high; key += KEYS)
                meet(item, head, first, count, position, key, std::min(KEYS, seen.high - key));
        }
        for (Index m = 0; m < count; m++) {
            const float total = softmax[m].total, part = total == 0 ? 0.0f : 1.0f / total;
            float *to = x.out.of(item, head, first + m);
            const float *from = outs.get() + m * value_row;
            for (Index d = 0; d < x.value_width; d++) to[d] = from[d] * part;
            if (x.lse) *x.lse.of(item, head, first + m) = softmax[m].log_sum();
        }
    }

    void take_queries(Index item, Index head, Index first, Index count) {
        const Array<const float> &others = x.rel_q ? x.rel_q : x.q;
        for (Index m = 0; m < count; m++) {
            const float *q = x.q.of(item, head, first + m);
            for (Index d = 0; d < x.width; d++) queries.get()[m * x.width + d] = q[d] * x.scale;
            if (!own_queries) continue;
            const float *other = others.of(item, head, first + m);
            for (Index d = 0; d < x.rel_width; d++) table_queries.get()[m * x.rel_width + d] = other[d] * x.rel_scale;
        }
        if (!relative || !x.clip) return;
        for (int side = 0; side < 2; side++) {
            const Index row = side ? x.rows - 1 : 0;
            for (Index m = 0; m < count; m++)
                edges[side][m] = (x.rel_k ? dot(met() + m * x.rel_width, x.rel_k.of(0, head, row), x.rel_width) : 0) +
                                 (x.bias ? x.bias.of(0, head)[row] : 0);
        }
    }

    const float *met() const { return own_queries ? table_queries.get() : queries.get(); }

    // A block of queries meets a block of keys, `start … start + n - 1`.
    void meet(Index item, Index head, Index first, Index count, Index position, Index start, Index n) {
        // The column of `products` for the relative position r is r - origin; panels of the table stay whole.
        const Index lowest = start - (position + height - 1) + x.left - table.first;
        const Index origin = floored(lowest, PANEL) + table.first - x.left;
        for (Index m = 0; m < count; m += HIGH) {
            const Index rows = std::min<Index>(HIGH, count - m), p = position + m;
            const Seen seen = Seen::of(x, p, p + rows - 1);
            const Index low = std::max(start, seen.low), high = std::min(start + n, seen.high);
            if (low >= high) continue;
            if (relative) multiply_table(m, rows, low - (p + rows - 1), high - p, origin);
            float *s = logits.get() + MARGIN + m * logits_row;
            for (Index j = floored(low - start, PANEL); j < high - start; j += PANEL)
                multiply<2>(rows, x.width, {queries.get() + m * x.width, x.width, 1},
                            keys.get() + (start + j - packed.low) * x.width, PANEL,
                            relative ? products.get() + m * products_row + (start + j - p - origin) : nullptr,
                            products_row - 1, s + j, logits_row);
            for (Index i = 0; i < rows; i++) weigh(item, head, first, position, m + i, start, low, high);
            mix(item, head, m, rows, p, start, low, high);
        }
    }

    // Write the products of some queries with the table for the relative positions low … high - 1.
    void multiply_table(Index m, Index rows, Index low, Index high, Index origin) {
        const Index to_row = x.left - table.first, have = table.end - table.first;
        const Index first = low + to_row, end = high + to_row;  // rows of what is packed, not all of them there
        for (Index c = floored(std::max<Index>(0, first), PANEL); c < std::min(have, end); c += PANEL)
            multiply<2>(rows, x.rel_k ? x.rel_width : 0, {met() + m * x.rel_width, x.rel_width, 1},
                        panels() + c * x.rel_width, PANEL, x.bias ? table.bias.get() + c : nullptr, 0,
                        products.get() + m * products_row + (c - to_row - origin), products_row);
        for (Index i = m; i < m + rows; i++) {
            float *row = products.get() + i * products_row - to_row - origin;
            if (first < 0) std::fill(row + first, row + std::min<Index>(0, end), x.clip ? edges[0][i] : 0.0f);
            if (end > have) std::fill(row + std::max(have, first), row + end, x.clip ? edges[1][i] : 0.0f);
        }
    }

    const float *panels() const { return table.panels.get(); }

    // Turn a row of products into weights, zeros where it sees nothing.
    void weigh(Index item, Index head, Index first, Index position, Index m, Index start, Index low, Index high) {
        const Seen seen = Seen::of(x, position + m, position + m);
        float *s = logits.get() + MARGIN + m * logits_row;
        const Row row{s, std::max(low, seen.low) - start, std::min(high, seen.high) - start};
        low -= start, high -= start;
        const Index before = x.rel_v ? low - MARGIN / 2 : low, after = x.rel_v ? high + MARGIN / 2 : high;
        if (row.low >= row.high) {
            std::fill(s + before, s + after, 0.0f);
            return;
        }
        finish_logits(x, row, MaskRow::of(x, item, head, first + m), start);
        const float factor = softmax[m].take(row);
        if (before < row.start()) std::fill(s + before, s + row.start(), 0.0f);
        if (row.end() < after) std::fill(s + row.end(), s + after, 0.0f);
        if (factor == 1.0f) return;
        float *out = outs.get() + m * value_row;
        for (Index d = 0; d < value_row; d += LANES) store(out + d, load(out + d) * factor);
    }

    // Add the values, times their weights.
    void mix(Index item, Index head, Index m, Index rows, Index p, Index start, Index low, Index high) {
        const float *weights = logits.get() + MARGIN + m * logits_row;
        const float *v = values ? values.get() + (low - packed.low) * value_row : x.v.of(item, head / x.group(), low);
        const Index v_row = values ? value_row : x.v.row;
        float *out = outs.get() + m * value_row;
        for (Index j = low; j < high;) {
            Index end = high;
            if (!values_finite) {  // nothing may be multiplied by 0 that a mask hides
                while (j < high && !weighs(weights + j - start, rows)) j++;
                for (end = j; end < high && weighs(weights + end - start, rows);) end++;
            }
            add_product(rows, end - j, {weights + j - start, logits_row, 1}, v + (j - low) * v_row, v_row, value_row,
                        out, value_row);
            j = end;
        }
        if (x.rel_v) mix_table(head, m, rows, p, start, low, high);
    }

    bool weighs(const float *weights, Index rows) const {
        for (Index i = 0; i < rows; i++)
            if (weights[i * logits_row] != 0) return true;
        return false;
    }

    // Add the rows of the values' table, times the weights in relative layout: a view of them.
    void mix_table(Index head, Index m, Index rows, Index p, Index start, Index low, Index high) {
        const float *weights = logits.get() + MARGIN + m * logits_row;
        const float *table = rel_v ? rel_v.get() : x.rel_v.of(0, head);
        const Index row = rel_v ? value_row : x.rel_v.row;
        const Index first = std::max(low - (p + rows - 1), -x.before) + x.left;
        const Index end = std::min(high - 1 - p, x.after) + x.left + 1;
        const Index c = std::max<Index>(0, first), stop = std::min(x.rows, end);
        if (c < stop)
            add_product(rows, stop - c, {weights + c - x.left + p - start, logits_row + 1, 1}, table + c * row, row,
                        value_row, outs.get() + m * value_row, value_row);
        if (!x.clip) return;
        for (Index i = 0; i < rows; i++) {
            const Index left = p + i - x.left - start, right = left + x.rows;  // keys that meet the first row, and none
            add_edge(m + i, weights + i * logits_row, low - start, std::min(high - start, left), table);
            add_edge(m + i, weights + i * logits_row, std::max(low - start, right), high - start,
                     table + (x.rows - 1) * row);
        }
    }

    void add_edge(Index m, const float *weights, Index low, Index high, const float *row) {
        if (low >= high) return;
        float total = 0;
        for (; low < high && low % LANES; low++) total += weights[low];
        Vec totals{};
        for (; low + LANES <= high; low += LANES) totals += load(weights + low);
        for (; low < high; low++) total += weights[low];
        const float weight = total + sum(totals);
        if (weight == 0) return;
        float *out = outs.get() + m * value_row;
        for (Index d = 0; d < value_row; d += LANES) store(out + d, load(out + d) + load(row + d) * weight);
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
