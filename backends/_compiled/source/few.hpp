// Calls with few queries: each key and each row of a table is read in place, once per query.
#pragma once

#include <type_traits>

#include "forward.hpp"
#include "int8.hpp"

namespace {

constexpr Index KEYS = 512;  // keys processed at once

// Write the products of a query with consecutive rows of N vectors each; N = 0: any number of vectors.
template <int N, class T>
inline void multiply_rows(const Real *query, const T *x, Index row, Index rows, Index width, Real *to) {
    const Index length = N ? N * LANES : width;
    for (Index j = 0; j < rows; j += LANES, x += LANES * row) {
        const Index last = std::min<Index>(rows - j, LANES) - 1;  // rows after the last one repeat it
        if (last < LANES / 4) {
            for (Index i = 0; i <= last; i++) to[j + i] = dot(query, x + i * row, length);
            return;
        }
        Vec total[LANES];
        for (Index i = 0; i < LANES; i++) {  // row by row, which memory reads fastest
            const T *at = x + std::min(i, last) * row;
            total[i] = load(query) * load(at);
#pragma GCC unroll 8
            for (Index d = LANES; d < length; d += LANES) total[i] += load(query + d) * load(at + d);
        }
        store(to + j, sums(total));
    }
}

template <class T>
void multiply_rows(const Real *query, const T *x, Index row, Index rows, Index width, Real *to) {
    if (width % LANES)
        for (Index j = 0; j < rows; j++) to[j] = dot(query, x + j * row, width);
    else if (width == 4 * LANES)
        multiply_rows<4>(query, x, row, rows, width, to);
    else if (width == 8 * LANES)
        multiply_rows<8>(query, x, row, rows, width, to);
    else
        multiply_rows<0>(query, x, row, rows, width, to);
}

// Add rows of values, multiplied by their weights, to an output.
template <class T>
void mix_rows(const Real *weights, const T *v, Index row, Index rows, Index width, Real *out) {
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
        for (Index j = 0; j < rows; j++) out[d] += weights[j] * Real(v[j * row + d]);
}

// Some heads of an item, which go through the blocks of keys together, so that shared rows are still in the cache. Rows
// of a shared table are multiplied by all heads while they are in the cache.
struct Few {
    static constexpr Index ROWS_AT_HAND = 64;

    const Problem &x;
    Tasks &tasks;
    const Index query_row, keys_row, value_row;
    Reals queries, relative, logits, outs;
    Softmax softmax[TOGETHER];
    Padding padding;
    Index entry = 0;

    Few(const Problem &x, Tasks &tasks)
        : x(x),
          tasks(tasks),
          query_row(padded(x.width) + padded(x.rel_width) + PANEL),
          keys_row(padded(std::min(KEYS, x.keys)) + 2 * MARGIN),
          value_row(padded(x.value_width)),
          padding(x) {}

    bool make() {
        queries = reals(TOGETHER * query_row);
        relative = reals(TOGETHER * keys_row);
        logits = reals(keys_row);
        outs = reals(TOGETHER * value_row);
        return queries && relative && logits && outs && padding.make();
    }

    void run() {
        for (Task task; tasks.take(task); tasks.finish(task)) {
            entry = x.entry(task.item), padding.take_keys(task.item);
            task.groups([&](Index group) {
                const Task::Piece piece = tasks.piece(task, group);
                for (Index i = piece.first; i < piece.end; i++) attend(task, piece, i);
            });
        }
    }

    bool apart() const { return x.has_rel_k() && (x.rel_q || x.rel_scale != x.scale); }
    Real *same(Index n) const { return queries.get() + n * query_row; }
    Real *rel_q(Index n) const { return same(n) + (apart() ? padded(x.width) : 0); }
    Real *of_table(Index n) const { return relative.get() + n * keys_row + MARGIN; }
    Real *out(Index n) const { return outs.get() + n * value_row; }

    void attend(const Task &task, const Task::Piece &piece, Index i) {
        const Index item = task.item, head = task.head, count = std::min(tasks.heads(), x.heads - head);
        const Index p = x.offset + i;
        Seen seen = Seen::of(x, p, p).within(piece.low, piece.high);
        padding.narrow(seen);
        for (Index n = 0; n < count; n++) take(item, head, n, i);
        for (Index key = seen.low; key < seen.high; key += KEYS) {
            const Index keys = std::min(KEYS, seen.high - key);
            if (x.rel_k_int8)
                write_relative(x.rel_k_int8, head, count, key - p, keys);
            else if (x.rel_k || x.rel_bias)
                write_relative(x.rel_k, head, count, key - p, keys);
            for (Index n = 0; n < count; n++)
                if (x.in_int8)
                    process(item, head, n, i, key, keys, x.k_int8, x.v_int8);
                else
                    process(item, head, n, i, key, keys, x.k, x.v);
        }
        if (piece.goes_on && !tasks.wait(task)) return;
        for (Index n = 0; n < count; n++) write_result(x, item, head + n, i, softmax[n], out(n), piece.goes_on);
    }

    void take(Index item, Index head, Index n, Index i) {
        const Stored *q = x.q.of(item, head + n, i), *other = x.rel_q ? x.rel_q.of(item, head + n, i) : q;
        Real *own = same(n);
        for (Index d = 0; d < x.width; d++) own[d] = q[d] * x.scale;
        if (apart())
            for (Index d = 0; d < x.rel_width; d++) rel_q(n)[d] = other[d] * x.rel_scale;
        std::fill(out(n), out(n) + x.value_width, 0);
        softmax[n] = Softmax();
    }

    template <class T>
    void process(Index item, Index head, Index n, Index i, Index key, Index count, const Array<const T> &k,
                 const Array<const T> &v) {
        const Index own = (head + n) / x.group(), r = key - (x.offset + i);
        const T *keys = k.of(item, own, key), *values = v.of(item, own, key);
        Real *s = logits.get() + MARGIN, *out = this->out(n);
        multiply_rows(same(n), keys, k.row, count, x.width, s);
        if (x.key_table) add_key_side(keys, k.row, head + n, r, count, s);
        if (x.in_int8) multiply_by(x.k_scale.of(item, own, key), x.k_scale.row, s, count, s);
        if (x.has_rel_k() || x.rel_bias)
            for (Index j = 0; j < count; j++) s[j] += of_table(n)[j];
        const Row row{s, 0, count};
        finish_logits(x, item, head + n, i, row, key);
        const Real factor = softmax[n].take(row);
        Kept::of(x, item, head + n, i, key).drop(row);
        if (factor != 1)
            for (Index d = 0; d < x.value_width; d++) out[d] *= factor;
        if (x.rel_v) mix_table(x.rel_v, s, head + n, r, count, of_table(n), out);
        if (x.rel_v_int8) mix_table(x.rel_v_int8, s, head + n, r, count, of_table(n), out);
        if (x.in_int8) multiply_by(x.v_scale.of(item, own, key), x.v_scale.row, s, count, s);
        mix_rows(s, values, v.row, count, x.value_width, out);
    }

    // The columns of n keys from the relative position r on, of which `before` are before the table.
    struct Overlap {
        Index before, inside, row;

        static Overlap of(const Problem &x, Index r, Index n) {
            const Index c = r + x.left, before = std::clamp<Index>(-c, 0, n);
            return {before, std::clamp<Index>(x.rows - (c + before), 0, n - before), c + before};
        }
    };

    // Write the relative part of the logits of n keys from the relative position r on, for some heads.
    template <class T>
    void write_relative(const Array<const T> &table, Index head, Index count, Index r, Index n) const {
        const Overlap at = Overlap::of(x, r, n);
        const Index rows = table && table.head == 0 ? ROWS_AT_HAND : std::max<Index>(at.inside, 1);
        for (Index h = 0; !table && h < count; h++) std::fill(of_table(h), of_table(h) + n, 0);
        for (Index j = 0; table && j < at.inside; j += rows)
            for (Index h = 0; h < count; h++)
                multiply_rows(rel_q(h), table.of(entry, head + h, at.row + j), table.row, std::min(rows, at.inside - j),
                              x.rel_width, of_table(h) + at.before + j);
        for (Index h = 0; h < count; h++) {
            Real *inside = of_table(h) + at.before;
            scale_rows(x.rel_k_scale, head + h, at, inside, inside);
            if (x.rel_bias)
                for (Index j = 0; j < at.inside; j++) inside[j] += x.rel_bias.of(entry, head + h)[at.row + j];
            write_edge(table, head, h, 0, 0, at.before);
            write_edge(table, head, h, x.rows - 1, at.before + at.inside, n);
        }
    }

    // Multiply a number for each row of a table by the scale of the row, if the table has scales.
    void scale_rows(const Array<const float> &scales, Index head, const Overlap &at, const Real *from, Real *to) const {
        if (scales && at.inside) multiply_by(scales.of(entry, head, at.row), scales.row, from, at.inside, to);
    }

    // Write the product with an edge row into the logits of the keys low … high - 1, which are beyond the table.
    template <class T>
    void write_edge(const Array<const T> &table, Index head, Index h, Index row, Index low, Index high) const {
        if (low >= high) return;
        Real edge = 0;
        if (x.clip && table) edge = dot(rel_q(h), table.of(entry, head + h, row), x.rel_width);
        if (x.clip && x.rel_k_scale) edge *= Real(*x.rel_k_scale.of(entry, head + h, row));
        if (x.clip && x.rel_bias) edge += Real(x.rel_bias.of(entry, head + h)[row]);
        std::fill(of_table(h) + low, of_table(h) + high, edge);
    }

    template <class T>
    void add_key_side(const T *keys, Index keys_row, Index head, Index r, Index n, Real *s) const {
        for (Index j = 0; j < n; j++) {
            const Index c = r + j + x.left, row = std::clamp<Index>(c, 0, x.rows - 1);
            if (c == row || x.clip)
                s[j] += x.rel_scale * dot(keys + j * keys_row, x.key_table.of(entry, head, row), x.width);
        }
    }

    // Add rows of a table, multiplied by their weights, to an output; there is room for n numbers at `scaled`.
    template <class T>
    void mix_table(const Array<const T> &table, const Real *weights, Index head, Index r, Index n, Real *scaled,
                   Real *out) const {
        const Overlap at = Overlap::of(x, r, n);
        const Real *inside = x.rel_v_scale ? scaled : weights + at.before;
        scale_rows(x.rel_v_scale, head, at, weights + at.before, scaled);
        if (at.inside) mix_rows(inside, table.of(entry, head, at.row), table.row, at.inside, x.value_width, out);
        if (!x.clip) return;
        for (int side = 0; side < 2; side++) {
            const Index low = side ? at.before + at.inside : 0, high = side ? n : at.before;
            if (low >= high) continue;
            Real weight = 0;
            for (Index j = low; j < high; j++) weight += weights[j];
            const Index edge = side ? x.rows - 1 : 0;
            const T *row = table.of(entry, head, edge);
            if (x.rel_v_scale) weight *= Real(*x.rel_v_scale.of(entry, head, edge));
            for (Index d = 0; d < x.value_width && weight != 0; d++) out[d] += weight * Real(row[d]);
        }
    }
};

inline bool attend_few(const Problem &x, Tasks &tasks) {
    Few work(x, tasks);
    if (!work.make()) return false;
    work.run();
    return true;
}

}  // namespace
