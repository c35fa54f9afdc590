// The backward pass: blocks of queries against blocks of keys once more, from the log-sum-exp of the forward pass.
//
// With P the weights and g the gradient of the output: dP = g vᵀ, dS = P ∘ (dP − δ), where δ is the mean of a row of
// dP, which is g · out, less the gradient of the log-sum-exp. From there every gradient is a product: of P or dS,
// transposed or not, in absolute or in relative layout.
#pragma once

#include "forward.hpp"

namespace {

// Sums of gradients of rows, with rows and columns to spare.
struct Sums {
    Reals at;
    Index row = 0, rows = 0;

    bool make(Index count, Index width) {
        row = padded(width), rows = count;
        at = zeros((count + HIGH) * row);
        return static_cast<bool>(at);
    }

    void clear() { std::memset(at.get(), 0, rows * row * sizeof(Real)); }

    void write(Real *to, Index to_row, Index width, Real scale) const {
        for (Index j = 0; j < rows; j++)
            for (Index d = 0; d < width; d++) to[j * to_row + d] = at.get()[j * row + d] * scale;
    }

    // Add them to what is there, and begin anew.
    void hand_over(Real *to, Index to_row, Index width) {
        for (Index j = 0; j < rows; j++)
            for (Index d = 0; d < width; d++) to[j * to_row + d] += at.get()[j * row + d];
        clear();
    }
};

struct Backward {
    static constexpr Index KEYS = 256;  // of a block

    const Problem &x;
    const Index sum;                               // which of the sums of tables' gradients is this thread's
    const Index width, rel_width, value_width;     // of padded rows
    const Index most, margin, logits_row, height;  // rows of a block, and zeros beside a row of weights
    Queries queries;
    const Span span;
    Relative relative, relative_values;
    KeySide key_side;
    Sight sight;
    const Places &places;
    ByRow changed_by_row, mixed_by_row;  // the gradients of the logits, and the weights
    Rows keys, rel_k, key_table;
    Reals key_panels, value_panels, d_outs, weights, d_logits, slopes, d_added;
    Real delta[ROWS];
    bool lost[ROWS];  // queries that are not finite
    Sums d_q, d_met, d_k, d_v, d_rel_k, d_rel_v, d_bias, d_key_table;

    Backward(const Problem &x, Index sum)
        : x(x),
          sum(sum),
          width(padded(x.width)),
          rel_width(padded(x.rel_width)),
          value_width(padded(x.value_width)),
          most(rows_of_blocks(x)),
          margin(most + LANES),
          logits_row(std::min(KEYS, padded(x.keys, PANEL)) + 2 * margin),
          height(std::min(most, padded(padded(x.queries, HIGH)))),
          queries(x),
          span(Span::of(x)),
          relative(x.rel_k, x.bias, span, x.rel_width),
          relative_values(x.rel_v, {}, span, x.value_width),
          key_side(x),
          sight(x),
          places(sight.places),
          changed_by_row(x, places),
          mixed_by_row(x, places) {}

    bool make() {
        key_panels = reals(padded(x.keys, PANEL) * x.width);
        value_panels = reals(padded(x.keys, PANEL) * x.value_width);
        d_outs = zeros(height * value_width);
        weights = reals(height * logits_row);
        d_logits = reals(height * logits_row);
        slopes = reals(logits_row), d_added = reals(logits_row);
        const Index columns = std::max(logits_row, columns_anywhere(x));
        return key_panels && value_panels && d_outs && weights && d_logits && slopes && d_added &&
               queries.make(height) && relative.make(height, columns) && relative_values.make(height, columns) &&
               key_side.make(true) && sight.make() && (!relative || changed_by_row.make(height)) &&
               (!x.rel_v || mixed_by_row.make(height)) && keys.make(x.keys, x.width, static_cast<bool>(sight)) &&
               d_q.make(height, x.width) && d_k.make(x.keys, x.width) && d_v.make(x.keys, x.value_width) &&
               make_tables();
    }

    bool make_tables() {
        return (!queries.apart || d_met.make(height, x.rel_width)) && (!x.bias || d_bias.make(1, x.rows)) &&
               (!x.rel_k ||
                (rel_k.make(x.rows, x.rel_width, static_cast<bool>(places)) && d_rel_k.make(x.rows, x.rel_width))) &&
               (!x.key_table ||
                (key_table.make(x.rows, x.width, static_cast<bool>(places)) && d_key_table.make(x.rows, x.width))) &&
               (!x.rel_v || d_rel_v.make(x.rows, x.value_width));
    }

    // Work on some heads of keys, of all items.
    void run(Index first, Index last) {
        for (Index pair = first; pair < last; pair++) {
            const Index item = pair / x.key_heads, own = pair % x.key_heads;
            pack(x.k.of(item, own), x.k.row, x.keys, x.width, key_panels.get());
            pack(x.v.of(item, own), x.v.row, x.keys, x.value_width, value_panels.get());
            keys.take(x.k.of(item, own), x.k.row, x.keys);
            sight.take_keys(item);
            for (Index head = own * x.group(); head < (own + 1) * x.group(); head++) {
                take_tables(head);
                for (Index i = 0; i < x.queries; i += most) pull_back(item, head, i);
                hand_tables_over(head);
            }
            d_k.write(x.d_k.of(item, own), x.d_k.row, x.width, 1);
            d_v.write(x.d_v.of(item, own), x.d_v.row, x.value_width, 1);
            d_k.clear(), d_v.clear();
        }
    }

    void take_tables(Index head) {
        relative.take(head), relative_values.take(head), key_side.take(head);
        if (x.rel_k && (!rel_k.at || x.rel_k.head)) rel_k.take(x.rel_k.of(0, head), x.rel_k.row, x.rows);
        if (x.key_table && (!key_table.at || x.key_table.head)) {
            const Array<const Real> from = turned(x.key_table, x.rows);
            key_table.take(from.of(0, head), from.row, x.rows);
        }
    }

    void hand_tables_over(Index head) {
        if (x.rel_k) d_rel_k.hand_over(x.d_rel_k.of(sum, head), x.d_rel_k.row, x.rel_width);
        if (x.rel_v) d_rel_v.hand_over(x.d_rel_v.of(sum, head), x.d_rel_v.row, x.value_width);
        if (x.key_table) {
            const Index row = x.d_key_table.row;
            d_key_table.hand_over(x.d_key_table.of(sum, head) + (x.rows - 1) * row, -row, x.width);
        }
        if (x.bias) d_bias.hand_over(x.d_bias.of(sum, head), 0, x.rows);
    }

    void pull_back(Index item, Index head, Index first) {
        const Index count = std::min(most, x.queries - first), position = x.offset + first;
        sight.take_queries(item, first, count), key_side.take_queries(item, first, count);
        const Seen seen = sight.of(0, count, position, 0, x.keys);
        d_q.clear();
        if (queries.apart) d_met.clear();
        if (!seen.none()) {
            queries.take(item, head, first, count);
            for (Index m = 0; m < count; m++) {
                const Real *d_out = x.d_out.of(item, head, first + m);
                for (Index d = 0; d < x.value_width; d++) d_outs.get()[m * value_width + d] = d_out[d] / x.kept;
                delta[m] = dot(d_out, x.given_out.of(item, head, first + m), x.value_width) -
                           (x.d_lse ? *x.d_lse.of(item, head, first + m) : 0);
            }
            keep_apart(count);
            relative.take_edges(queries.met(), queries.met_row(), count);
            relative_values.take_edges(d_outs.get(), value_width, count);
            begin_anywhere(count);
            for (Index key = floored(seen.low, PANEL); key < seen.high; key += KEYS)
                meet(item, head, first, count, position, key, std::min(KEYS, seen.high - key));
            end_anywhere(count);
        }
        for (Index m = 0; m < count; m++) write_queries(item, head, first, m);
    }

    // Of queries and keys that stand anywhere: products with tables are taken once for a block, and so are those that
    // give the tables' gradients.
    void begin_anywhere(Index count) {
        if (!places) return;
        places.multiply(relative, queries.met(), queries.met_row(), count);
        places.multiply(relative_values, d_outs.get(), value_width, count);
        if (changed_by_row) changed_by_row.clear(count);
        if (mixed_by_row) mixed_by_row.clear(count);
    }

    void end_anywhere(Index count) {
        Sums &met = queries.apart ? d_met : d_q;
        if (!places) return;
        if (x.rel_k) {
            changed_by_row.mix(count, rel_k, met.at.get(), met.row);
            changed_by_row.spread(count, queries.met(), queries.met_row(), rel_width, d_rel_k.at.get(), d_rel_k.row);
        }
        if (x.rel_v) mixed_by_row.spread(count, d_outs.get(), value_width, value_width, d_rel_v.at.get(), d_rel_v.row);
        if (x.bias) changed_by_row.add_to(d_bias.at.get(), count);
    }

    // A query that is not finite may reach the gradients of what it sees, and of nothing else: 0 · NaN is not 0.
    void keep_apart(Index count) {
        for (Index m = 0; m < count; m++) {
            Real *own = queries.same.get() + m * width;
            Real *other = queries.apart ? queries.others.get() + m * rel_width : nullptr;
            lost[m] = !finite(own, x.width) || (other && !finite(other, x.rel_width));
            if (!lost[m]) continue;
            std::fill(own, own + width, 0);
            if (other) std::fill(other, other + rel_width, 0);
        }
    }

    void write_queries(Index item, Index head, Index first, Index m) const {
        Real *to = x.d_q.of(item, head, first + m);
        const Real *own = d_q.at.get() + m * d_q.row;
        for (Index d = 0; d < x.width; d++) to[d] = own[d] * x.scale;
        if (!queries.apart) return;
        const Real *met = d_met.at.get() + m * d_met.row;
        if (x.rel_q) to = x.d_rel_q.of(item, head, first + m);
        for (Index d = 0; d < x.rel_width; d++) to[d] = met[d] * x.rel_scale + (x.rel_q ? 0 : to[d]);
    }

    // A block of queries meets a block of keys, `start … start + n - 1`.
    void meet(Index item, Index head, Index first, Index count, Index position, Index start, Index n) {
        const Seen seen = sight.of(0, count, position, start, start + n);
        const Index low = seen.low - start, high = seen.high - start;
        if (low >= high) return;
        Real *p = weights.get() + margin, *ds = d_logits.get() + margin;
        if (x.key_table) key_side.write(item, head, count, position, start, n, p, logits_row);
        const Weights mixed{p, logits_row, count, position, start, low, high};
        const Weights changed{ds, logits_row, count, position, start, low, high};
        for (Index m = 0; m < count; m += HIGH) {
            const Index rows = std::min<Index>(HIGH, count - m);
            const Seen own = sight.of(m, rows, position + m, start, start + n);
            const Index from = own.low - start, to = own.high - start;
            if (from < to) multiply_block(m, rows, position, start, from, to);
            for (Index i = m; i < m + rows; i++) weigh(item, head, first, position, i, start, {from, to}, {low, high});
            if (from < to) mix_queries(m, {ds + m * logits_row, logits_row, rows, position + m, start, from, to});
        }
        const Index keys_there = high - low;
        Real *d_keys = d_k.at.get() + (start + low) * d_k.row, *d_values = d_v.at.get() + (start + low) * d_v.row;
        add_product(keys_there, count, {p + low, 1, logits_row}, d_outs.get(), value_width, value_width, d_values,
                    d_v.row);
        add_product(keys_there, count, {ds + low, 1, logits_row}, queries.same.get(), width, width, d_keys, d_k.row);
        if (x.key_table)
            key_side.pull_back(keys, item, count, position, start + low, keys_there, ds + low, logits_row, d_keys,
                               d_k.row, d_key_table.at.get(), d_key_table.row, key_table);
        if (places) return;
        if (x.rel_k) changed.spread(span, queries.met(), queries.met_row(), rel_width, d_rel_k.at.get(), d_rel_k.row);
        if (x.rel_v) mixed.spread(span, d_outs.get(), value_width, value_width, d_rel_v.at.get(), d_rel_v.row);
        if (x.bias) add_to_bias(changed);
    }

    // Write products of queries with keys and with the table, and of the outputs' gradients with values and theirs.
    void multiply_block(Index m, Index rows, Index position, Index start, Index from, Index to) {
        const Index p = position + m, low = start + from - (p + rows - 1), high = start + to - p;
        const Index origin = relative.origin(start - (position + height - 1));
        const Index of_values = relative_values.origin(start - (position + height - 1));
        const Real *g = d_outs.get() + m * value_width;
        if (relative && !places) relative.multiply(queries.met(), queries.met_row(), m, rows, low, high, origin);
        if (relative_values && !places)
            relative_values.multiply(d_outs.get(), value_width, m, rows, low, high, of_values);
        for (Index j = floored(from, PANEL); j < to; j += PANEL) {
            Real *s = weights.get() + margin + m * logits_row + j, *d = d_logits.get() + margin + m * logits_row + j;
            const Start of_logits = Start::of(relative, places, m, rows, start + j, p, origin, s, logits_row,
                                              static_cast<bool>(x.key_table));
            ::multiply<2>(rows, x.width, {queries.same.get() + m * queries.row, queries.row, 1},
                          key_panels.get() + (start + j) * x.width, PANEL, of_logits.at, of_logits.row, s, logits_row);
            const Start of_weights =
                Start::of(relative_values, places, m, rows, start + j, p, of_values, d, logits_row);
            ::multiply<2>(rows, x.value_width, {g, value_width, 1}, value_panels.get() + (start + j) * x.value_width,
                          PANEL, of_weights.at, of_weights.row, d, logits_row);
        }
    }

    // Turn a row of products into weights and the gradient of the logits, with zeros around both; `there` are the
    // columns of products, and `all` those of the block.
    void weigh(Index item, Index head, Index first, Index position, Index m, Index start, Seen there, Seen all) {
        const Seen seen = Seen::of(x, position + m, position + m);
        Real *s = weights.get() + margin + m * logits_row, *d = d_logits.get() + margin + m * logits_row;
        const Row row{s, std::max(there.low, seen.low - start), std::min(there.high, seen.high - start)};
        const Row changed{d, row.low, row.high};
        if (row.low < row.high) {
            const Real log_sum = *x.given_lse.of(item, head, first + m);
            if (x.softcap != 0) take_slopes(row);
            finish_logits(x, row, MaskRow::of(x, item, head, first + m), start);
            sight.hide(m, row, start);
            const Kept kept = Kept::of(x, item, head, first + m, start);
            const Real origin = lost[m] ? NAN : log_sum == -INF ? INF : log_sum;
            const Row uncapped{x.d_added ? d_added.get() + margin : nullptr, row.low, row.high};
            for (Index j = row.start(); j < row.end(); j += LANES) {
                const Vec weight = exponential(load(s + j) - origin), here = kept ? kept.at(j) : splat(1);
                Vec change = weight * (load(d + j) * here - delta[m]);
                change = weight == Vec{} ? Vec{} : change;  // what is hidden may be anything
                if (uncapped.at) store(uncapped.at + j, change);
                if (x.softcap != 0) change = weight == Vec{} ? Vec{} : change * load(slopes.get() + margin + j);
                store(s + j, weight * here);
                store(d + j, change);
            }
            if (uncapped.at) add_to_mask(x.gradient_of_mask(sum, item, head, first + m), uncapped, start);
        }
        if (lost[m]) row.put_around(0), changed.put_around(0);
        if (changed_by_row && row.low < row.high) changed_by_row.add(m, changed, start);
        if (mixed_by_row && row.low < row.high) mixed_by_row.add(m, row, start);
        row.clear_around(s + (all.low - margin), s + (all.high + margin));
        changed.clear_around(d + (all.low - margin), d + (all.high + margin));
    }

    // Add a row of the logits' gradients to a mask's; `first` is the key that column 0 stands for.
    void add_to_mask(Real *to, const Row &row, Index first) const {
        if (x.d_added.column == 0) {  // around the row are zeros
            Vec total{};
            for (Index j = row.start(); j < row.end(); j += LANES) total += load(row.at + j);
            *to += ::sum(total);
            return;
        }
        to += first;
        Index j = row.low;
        for (; j + LANES <= row.high; j += LANES) store(to + j, load(to + j) + load(row.at + j));
        for (; j < row.high; j++) to[j] += row.at[j];
    }

    // Keep by how much each logit follows its product through a softcap.
    void take_slopes(const Row &row) {
        for (Index j = row.start(); j < row.end(); j += LANES) {
            Vec t = hyperbolic_tangent(load(row.at + j) * (1 / x.softcap));
            store(slopes.get() + margin + j, splat(1) - t * t);
        }
    }

    void mix_queries(Index m, const Weights &changed) {
        add_product(changed.count, changed.high - changed.low, {changed.at + changed.low, logits_row, 1},
                    keys.at + (changed.start + changed.low) * keys.row, keys.row, width, d_q.at.get() + m * d_q.row,
                    d_q.row);
        Sums &to = queries.apart ? d_met : d_q;
        if (x.rel_k && !places) changed.mix(span, rel_k.at, rel_k.row, rel_width, to.at.get() + m * to.row, to.row);
    }

    void add_to_bias(const Weights &changed) {
        Real *to = d_bias.at.get();
        for (Index i = 0; i < changed.count; i++) {
            const Index shift = changed.start - (changed.p + i) + x.left;  // from keys to rows
            const Real *row = changed.at + i * changed.row;
            Index j = std::max(changed.low, -shift);
            const Index end = std::min(changed.high, x.rows - shift);
            for (; j < end; j++) to[j + shift] += row[j];
            if (x.clip) to[0] += changed.beyond(span, i, 0), to[x.rows - 1] += changed.beyond(span, i, 1);
        }
    }
};

inline bool backward(const Problem &x, Index part, Index parts) {
    const Index pairs = x.items * x.key_heads;
    Backward work(x, part % x.sums);
    if (!work.make()) return false;
    work.run(pairs * part / parts, pairs * (part + 1) / parts);
    return true;
}

}  // namespace
