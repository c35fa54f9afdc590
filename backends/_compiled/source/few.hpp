// Calls of few queries: each key and each row of a table is read once for each query, as it stands.
#pragma once

#include <type_traits>

#include "forward.hpp"

namespace {

constexpr Index KEYS = 512;  // that are worked on at once
constexpr Index FEW = 4;     // queries up to which nothing is worth packing

// Write the products of a query with consecutive rows.
inline void multiply_rows(const float *query, const float *x, Index row, Index rows, Index width, float *to) {
    Index j = 0;
    if (width % LANES == 0)
        for (; j + LANES <= rows; j += LANES, x += LANES * row) {
            Vec total[LANES];
            for (int i = 0; i < LANES; i++) {  // row after row, as memory likes it
                total[i] = load(query) * load(x + i * row);
                for (Index d = LANES; d < width; d += LANES) total[i] += load(query + d) * load(x + i * row + d);
            }
            store(to + j, sums(total));
        }
    for (; j < rows; j++, x += row) to[j] = dot(query, x, width);
}

// Add rows of values to an output, times their weights.
inline void mix_rows(const float *weights, const float *v, Index row, Index rows, Index width, float *out) {
    Index d = 0;
    const auto columns = [&](auto count) {
        constexpr int N = decltype(count)::value;
        Vec total[2][N];
        for (int i = 0; i < N; i++) total[0][i] = load(out + d + i * LANES), total[1][i] = Vec{};
        Index j = 0;
        for (; j + 2 <= rows; j += 2)
            for (int i = 0; i < N; i++) {
                total[0][i] += weights[j] * load(v + j * row + d + i * LANES);
                total[1][i] += weights[j + 1] * load(v + (j + 1) * row + d + i * LANES);
            }
        for (; j < rows; j++)
            for (int i = 0; i < N; i++) total[0][i] += weights[j] * load(v + j * row + d + i * LANES);
        for (int i = 0; i < N; i++) store(out + d + i * LANES, total[0][i] + total[1][i]);
        d += N * LANES;
    };
    while (d + 4 * LANES <= width) columns(std::integral_constant<int, 4>());
    while (d + LANES <= width) columns(std::integral_constant<int, 1>());
    for (; d < width; d++)
        for (Index j = 0; j < rows; j++) out[d] += weights[j] * v[j * row + d];
}

struct Few {
    const Problem &x;
    Floats query, relative, logits;

    bool make() {
        query = floats(x.width + x.rel_width + 2 * PANEL);
        relative = floats(std::min(KEYS, x.keys) + 2 * MARGIN);
        logits = floats(std::min(KEYS, x.keys) + 2 * MARGIN);
        return query && relative && logits;
    }

    void run(Index first, Index last) {
        for (Index pair = first; pair < last; pair++)
            for (Index i = 0; i < x.queries; i++) attend(pair / x.heads, pair % x.heads, i);
    }

    void attend(Index item, Index head, Index i) {
        const Index p = x.offset + i;
        const Seen seen = Seen::of(x, p, p);
        const float *q = x.q.of(item, head, i);
        float *own = query.get(), *met = own, *out = x.out.of(item, head, i), *s = logits.get() + MARGIN;
        for (Index d = 0; d < x.width; d++) own[d] = q[d] * x.scale;
        if (x.rel_k && (x.rel_q || x.rel_scale != x.scale)) {
            met = own + padded(x.width);
            const float *other = x.rel_q ? x.rel_q.of(item, head, i) : q;
            for (Index d = 0; d < x.rel_width; d++) met[d] = other[d] * x.rel_scale;
        }
        std::fill(out, out + x.value_width, 0.0f);
        const MaskRow mask = MaskRow::of(x, item, head, i);
        Softmax softmax;
        for (Index key = seen.low; key < seen.high; key += KEYS) {
            const Index n = std::min(KEYS, seen.high - key);
            multiply_rows(own, x.k.of(item, head / x.group(), key), x.k.row, n, x.width, s);
            add_relative(met, head, key - p, n, s);
            if (x.key_table) add_key_side(x.k.of(item, head / x.group(), key), head, key - p, n, s);
            const Row row{s, 0, n};
            finish_logits(x, row, mask, key);
            const float factor = softmax.take(row);
            Kept::of(x, item, head, i, key).drop(row);
            if (factor != 1.0f)
                for (Index d = 0; d < x.value_width; d++) out[d] *= factor;
            mix_rows(s, x.v.of(item, head / x.group(), key), x.v.row, n, x.value_width, out);
            if (x.rel_v) mix_table(s, head, key - p, n, out);
        }
        const float total = softmax.total * x.kept, part = total == 0 ? 0.0f : 1.0f / total;
        for (Index d = 0; d < x.value_width; d++) out[d] *= part;
        if (x.lse) *x.lse.of(item, head, i) = softmax.log_sum();
    }

    // The columns of n keys from the relative position r on, of which `before` meet what stands before the table.
    struct Reach {
        Index before, inside, row;

        static Reach of(const Problem &x, Index r, Index n) {
            const Index c = r + x.left, before = std::clamp<Index>(-c, 0, n);
            return {before, std::clamp<Index>(x.rows - (c + before), 0, n - before), c + before};
        }
    };

    void add_relative(const float *met, Index head, Index r, Index n, float *s) const {
        if (!x.rel_k && !x.bias) return;
        const Reach at = Reach::of(x, r, n);
        float *to = relative.get() + MARGIN;
        if (x.rel_k && at.inside > 0)
            multiply_rows(met, x.rel_k.of(0, head, at.row), x.rel_k.row, at.inside, x.rel_width, to + at.before);
        else
            std::fill(to, to + n, 0.0f);
        if (x.bias)
            for (Index j = 0; j < at.inside; j++) to[at.before + j] += x.bias.of(0, head)[at.row + j];
        for (int side = 0; side < 2; side++) {
            const Index low = side ? at.before + at.inside : 0, high = side ? n : at.before;
            if (low >= high) continue;
            const Index row = side ? x.rows - 1 : 0;
            float edge = 0;
            if (x.clip)
                edge = (x.rel_k ? dot(met, x.rel_k.of(0, head, row), x.rel_width) : 0) +
                       (x.bias ? x.bias.of(0, head)[row] : 0);
            std::fill(to + low, to + high, edge);
        }
        for (Index j = 0; j < n; j++) s[j] += to[j];
    }

    void add_key_side(const float *keys, Index head, Index r, Index n, float *s) const {
        for (Index j = 0; j < n; j++) {
            const Index c = r + j + x.left, row = std::clamp<Index>(c, 0, x.rows - 1);
            if (c == row || x.clip)
                s[j] += x.rel_scale * dot(keys + j * x.k.row, x.key_table.of(0, head, row), x.width);
        }
    }

    void mix_table(const float *weights, Index head, Index r, Index n, float *out) const {
        const Reach at = Reach::of(x, r, n);
        mix_rows(weights + at.before, x.rel_v.of(0, head, at.row), x.rel_v.row, at.inside, x.value_width, out);
        if (!x.clip) return;
        for (int side = 0; side < 2; side++) {
            const Index low = side ? at.before + at.inside : 0, high = side ? n : at.before;
            if (low >= high) continue;
            float weight = 0;
            for (Index j = low; j < high; j++) weight += weights[j];
            const float *row = x.rel_v.of(0, head, side ? x.rows - 1 : 0);
            for (Index d = 0; d < x.value_width && weight != 0; d++) out[d] += weight * row[d];
        }
    }
};

inline bool attend_few(const Problem &x, Index part, Index parts) {
    const Index heads = x.items * x.heads;
    Few work{x, nullptr, nullptr, nullptr};
    if (!work.make()) return false;
    work.run(heads * part / parts, heads * (part + 1) / parts);
    return true;
}

}  // namespace
