// The backward pass: each block of queries with each block of keys again, from the sums of weights of the forward pass.
//
// With P the weights and g the gradient of the output: dP = g vᵀ and dS = P ∘ (dP − δ). δ is the weighted mean of a row
// of dP, which equals g · out, minus the gradient of the log-sum-exp. Every gradient is then a product with P or dS,
// transposed or not, in absolute or in relative layout.
#pragma once

#include "forward.hpp"

namespace {

// Sums of the gradients of rows, padded with extra rows and columns.
struct Sums {
    Reals at;
    Index row = 0, rows = 0;

    bool make(Index count, Index width) {
        row = padded(width), rows = count;
        at = zeros((count + HIGH) * row);
        return static_cast<bool>(at);
    }

    void clear() { std::memset(at.get(), 0, rows * row * sizeof(Real)); }
    Real *of(Index j) const { return at.get() + j * row; }

    // Add rows to sums, or write them there, and clear them.
    void hand_over(Index first, Index end, Real *to, Index to_row, Index width, bool adds = true) {
        for (Index j = first; j < end; j++, to += to_row) hand_over(of(j), to, width, adds);
    }

    static void hand_over(Real *own, Real *to, Index width, bool adds = true) {
        Index d = 0;
        for (; d + LANES <= width; d += LANES) {
            store(to + d, adds ? load(to + d) + load(own + d) : load(own + d));
            store(own + d, Vec{});
        }
        for (; d < width; d++) to[d] = adds ? to[d] + own[d] : own[d], own[d] = 0;
    }
};

struct Backward {
    static constexpr Index KEYS = 256;  // keys per block

    const Problem &x;
    Tasks &tasks;
    const Index room;                              // capacity for keys
    const Index width, rel_width, value_width;     // of padded rows
    const Index most, margin, logits_row, height;  // rows per block, and the padding of a row of weights:
    const Index zeros_before, zeros_after;         // zeros that skewed products read, or those of HIGH rows
    Queries queries;
    const Span span;
    Relative relative, relative_values;
    KeySide key_side;
    Sight sight;
    const Places &places;
    Grid grid;
    ByRow changed_by_row, mixed_by_row;  // the gradients of the logits, and the weights, by row of the table
    Rows keys, rel_k, key_table;
    JoinedRows key_pairs, table_pairs;
    Rounded rounded_outs, rounded_changes;  // of a block; of a strip of it
    Joined joined_outs, joined_queries;     // of a block
    Turned turned_weights, turned_changes, skewed_changes;
    Reals key_panels, value_panels, d_outs, weights, d_logits, slopes, d_added;
    Real delta[ROWS];
    bool lost[ROWS];  // which queries are not finite
    Sums d_q, d_rel_q, d_k, d_v, d_rel_k, d_rel_v, d_bias, d_key_table, d_mask, d_axis_tables;
    Real *own_q = nullptr, *own_rel_q = nullptr;  // where the rows of the block begin in d_q and d_rel_q
    Packed packed;
    Seen task_queries{0, 0};

    Backward(const Problem &x, Tasks &tasks)
        : x(x),
          tasks(tasks),
          room(room_for_keys(tasks)),
          width(padded(x.width)),
          rel_width(padded(x.rel_width)),
          value_width(padded(x.value_width)),
          most(rows_of_blocks(x)),
          margin(has_tables(x) ? most + LANES : padded(HIGH + LANES)),
          logits_row(std::min(KEYS, padded(x.keys, PANEL)) + 2 * margin),
          height(std::min(most, padded(padded(x.queries, HIGH)))),
          zeros_before(has_tables(x) ? margin : 0),
          zeros_after(has_tables(x) ? margin : HIGH),
          queries(x),
          span(Span::of(x)),
          relative(x.rel_k, x.rel_bias, span, x.rel_width),
          relative_values(x.rel_v, {}, span, x.value_width),
          key_side(x),
          sight(x),
          places(sight.places),
          grid(x),
          changed_by_row(x, places, !x.rel_k),
          mixed_by_row(x, places) {
        relative.in_pairs = queries.in_pairs, relative.of_bias = 1 / queries.rest;
    }

    bool make() {
        if (queries.in_pairs && !make_pairs()) return false;
        key_panels = reals(room * x.width);
        value_panels = reals(room * x.value_width);
        d_outs = zeros(height * value_width);
        weights = reals(height * logits_row);
        d_logits = reals(height * logits_row);
        slopes = reals(logits_row), d_added = reals(logits_row);
        const Index columns = std::max(logits_row, columns_anywhere(x));
        const bool whole = static_cast<bool>(places);
        return key_panels && value_panels && d_outs && weights && d_logits && slopes && d_added &&
               queries.make(height) && relative.make(height, columns, whole) &&
               relative_values.make(height, columns, whole) && key_side.make(true) && sight.make() &&
               grid.make(height, logits_row, true) && (!relative || changed_by_row.make(height)) &&
               (!x.rel_v || mixed_by_row.make(height)) &&
               (queries.in_pairs ||
                keys.make(room, x.width, static_cast<bool>(sight), lie_apart(x, x.k.row, x.width))) &&
               d_q.make(tasks.most_queries_of_a_group(), x.width) && make_by_key() && make_tables();
    }

    // Visit the sums of what has a row for each key: these, the array that they are added to, and its width.
    template <class Visit>
    void by_key(Visit &&visit) {
        visit(d_k, x.d_k, x.width), visit(d_v, x.d_v, x.value_width);
    }

    bool make_by_key() {
        bool made = true;
        by_key([&](Sums &sums, const auto &to, Index columns) { made = made && (!to || sums.make(room, columns)); });
        return made;
    }

    static bool has_tables(const Problem &x) { return x.rel_k || x.rel_v || x.rel_bias || x.key_table; }

    bool make_pairs() {
        return key_pairs.make(room, x.width) && (!x.rel_k || table_pairs.make(x.rows, x.rel_width)) &&
               rounded_outs.make(height, value_width) && rounded_changes.make(STRIP, logits_row, margin) &&
               joined_outs.make(height, value_width) && joined_queries.make(height, width) &&
               turned_weights.make(height, logits_row, margin) && turned_changes.make(height, logits_row, margin) &&
               (!x.rel_k || skewed_changes.make(height, logits_row, margin));
    }

    bool make_tables() {
        return (!queries.apart || d_rel_q.make(tasks.most_queries_of_a_group(), x.rel_width)) &&
               (!x.rel_bias || d_bias.make(1, x.rows)) &&
               (!x.rel_k ||
                (rel_k.make(x.rows, x.rel_width, static_cast<bool>(places)) && d_rel_k.make(x.rows, x.rel_width))) &&
               (!x.key_table ||
                (key_table.make(x.rows, x.width, static_cast<bool>(places)) && d_key_table.make(x.rows, x.width))) &&
               (!x.rel_v || d_rel_v.make(x.rows, x.value_width)) &&
               (!grid || d_axis_tables.make(x.axis_rows(), x.width)) &&
               (!x.d_added || has_own_mask() ||
                d_mask.make(x.added.sizes[2] == 1 ? 1 : tasks.most_queries(), x.added.sizes[3] == 1 ? 1 : room));
    }

    // Whether the mask has a separate entry for each pair of a query and a key.
    bool has_own_mask() const {
        const auto &[items, heads, rows, columns] = x.added.sizes;
        return items == x.items && heads == x.heads && rows == x.queries && columns == x.keys;
    }

    void run() {
        for (Task task; tasks.take(task); tasks.finish(task)) {
            take_head(task);
            task.groups([&](Index group) { pull_back(task, tasks.piece(task, group)); });
            hand_over(task);
        }
        if (queries.in_pairs) release_tiles();
    }

    void take_head(const Task &task) {
        const Index item = task.item, head = task.head, own = head / x.group(), entry = x.entry(item);
        relative.take(entry, head), relative_values.take(entry, head), key_side.take(entry, head);
        grid.take(entry, head), sight.take_keys(item);
        if (x.rel_k && rel_k.given != x.rel_k.of(entry, head))
            rel_k.take(x.rel_k.of(entry, head), x.rel_k.row, 0, 0, x.rows);
        if (x.rel_k && queries.in_pairs && table_pairs.given != x.rel_k.of(entry, head))
            table_pairs.take(x.rel_k.of(entry, head), x.rel_k.row, 0, 0, x.rows);
        const Array<const Stored> of_keys = turned(x.key_table, x.rows);
        if (x.key_table && key_table.given != of_keys.of(entry, head))
            key_table.take(of_keys.of(entry, head), of_keys.row, 0, 0, x.rows);
        task_queries = tasks.queries(task);
        const Seen seen = tasks.keys(task);
        if (seen.none()) return;
        const Index done = packed.take(item, own, seen, room), there = done - packed.first, n = packed.end - done;
        const bool pairs = queries.in_pairs;
        if (n > 0) {
            pack_as(pairs, x.k.of(item, own, done), x.k.row, n, x.width, key_panels.get() + there * queries.depth());
            pack_as(pairs, x.v.of(item, own, done), x.v.row, n, x.value_width, value_panels.get() + there * depth());
        }
        if (pairs)
            key_pairs.take(x.k.of(item, own), x.k.row, packed.first, done, packed.end);
        else
            keys.take(x.k.of(item, own), x.k.row, packed.first, done, packed.end);
    }

    // Add the sums of a task to those of the tasks before it.
    void hand_over(const Task &task) {
        const Index item = task.item, head = task.head, own = head / x.group(), entry = x.entry(item);
        if (tasks.share_sums() && !tasks.wait(task)) return;
        if (task.from.key) write_queries(task, tasks.piece(task, task.from.group));
        Seen seen = tasks.keys(task);
        for (Index j = 0; task.begins && j < x.keys; j++) {
            if (j >= seen.low && j < seen.high) continue;
            by_key(
                [&](Sums &, const auto &to, Index columns) { std::fill_n(to.of(item, own, j), to ? columns : 0, 0); });
        }
        if (seen.none()) return;
        const Index first = seen.low - packed.first, end = seen.high - packed.first;
        by_key([&](Sums &sums, const auto &to, Index columns) {
            if (to) sums.hand_over(first, end, to.of(item, own, seen.low), to.row, columns, !task.begins);
        });
        const auto [low, high] = rows_of(seen);
        if (x.rel_k) d_rel_k.hand_over(low, high, x.d_rel_k.of(entry, head, low), x.d_rel_k.row, x.rel_width);
        if (x.rel_v) d_rel_v.hand_over(low, high, x.d_rel_v.of(entry, head, low), x.d_rel_v.row, x.value_width);
        if (grid)
            d_axis_tables.hand_over(0, x.axis_rows(), x.d_axis_tables.of(entry, head), x.d_axis_tables.row, x.width);
        if (x.key_table)  // its rows are in the opposite order
            d_key_table.hand_over(x.rows - high, x.rows - low, x.d_key_table.of(entry, head, high - 1),
                                  -x.d_key_table.row, x.width);
        for (Index c = low; x.rel_bias && c < high; c++)
            x.d_rel_bias.of(entry, head)[c] += d_bias.at.get()[c] / queries.rest, d_bias.at.get()[c] = 0;
        hand_over_mask(item, head, first, end);
    }

    void hand_over_mask(Index item, Index head, Index first, Index end) {
        const bool column = x.added.sizes[3] == 1;  // the mask has a single column
        for (Index m = 0; m < std::min(d_mask.rows, task_queries.high - task_queries.low); m++) {
            Real *to = x.d_added.of(item, head, task_queries.low + m) + (column ? 0 : packed.first);
            if (column)
                Sums::hand_over(d_mask.of(m), to, 1);
            else
                Sums::hand_over(d_mask.of(m) + first, to + first, end - first);
        }
    }

    // The rows of the tables for the relative positions between a task's queries and keys; edge rows for positions
    // beyond.
    Seen rows_of(Seen keys) const {
        if (places) return {0, x.rows};
        const Index low = keys.low - (x.offset + task_queries.high - 1),
                    high = keys.high - (x.offset + task_queries.low);
        return {std::clamp<Index>(low + x.left, 0, x.rows - 1), std::clamp<Index>(high + x.left, 1, x.rows)};
    }

    void pull_back(const Task &task, const Task::Piece &piece) {
        d_q.clear();
        if (queries.apart) d_rel_q.clear();
        for (Index first = piece.first; first < piece.end; first += most)
            pull_back(task, piece, first, std::min(most, piece.end - first));
        if (!piece.goes_on) write_queries(task, piece);  // else later, when the tasks before are done
    }

    void pull_back(const Task &task, const Task::Piece &piece, Index first, Index count) {
        if (queries.in_pairs) configure_tiles();
        const Index item = task.item, head = task.head, position = x.offset + first;
        sight.take_queries(item, first, count), key_side.take_queries(item, first, count);
        own_q = d_q.of(first - piece.first), own_rel_q = queries.apart ? d_rel_q.of(first - piece.first) : own_q;
        const Seen seen = sight.of(0, count, position, piece.low, piece.high);
        if (!seen.none()) {
            queries.take(item, head, first, count);
            for (Index m = 0; m < count; m++) {
                const Stored *d_out = x.d_out.of(item, head, first + m);
                for (Index d = 0; d < x.value_width; d++) d_outs.get()[m * value_width + d] = d_out[d];
                delta[m] = dot(d_out, x.given_out.of(item, head, first + m), x.value_width) -
                           (x.d_lse ? *x.d_lse.of(item, head, first + m) : 0);
            }
            keep_apart(count);
            if (queries.in_pairs) take_pairs(count);
            relative.take_edges(queries.rel_q(), queries.rel_q_row(), count);
            relative_values.take_edges(d_outs.get(), value_width, count);
            begin_anywhere(count);
            grid.multiply(queries.rel_q(), queries.rel_q_row(), first, count);
            for (Index key = floored(seen.low, PANEL); key < seen.high; key += KEYS)
                process(item, head, first, count, position, key, std::min(KEYS, seen.high - key));
            end_anywhere(count);
            grid.pull_back(count, queries.rel_q(), queries.rel_q_row(), own_rel_q, rel_q_row(), d_axis_tables.at.get(),
                           d_axis_tables.row);
        }
    }

    void take_pairs(Index count) {
        rounded_outs.take(d_outs.get(), value_width, count, 0, value_width);
        joined_outs.take(d_outs.get(), value_width, count, value_width);
        queries.pairs.take(queries.same.get(), width, count, 0, width);  // rows that are not finite are zeros here
        joined_queries.take(queries.same.get(), width, count, width);
    }

    // How many columns, or pairs of columns, a product with the values sums over.
    Index depth() const { return queries.in_pairs ? (x.value_width + 1) / 2 : x.value_width; }

    // For arbitrary positions: compute the products with the tables once per block, and clear the sums for the tables'
    // gradients.
    void begin_anywhere(Index count) {
        if (!places) return;
        places.multiply(relative, queries.rel_q(), queries.rel_q_row(), count);
        places.multiply(relative_values, d_outs.get(), value_width, count);
        if (changed_by_row) changed_by_row.clear(count);
        if (mixed_by_row) mixed_by_row.clear(count);
    }

    void end_anywhere(Index count) {
        if (!places) return;
        if (x.rel_k) {
            changed_by_row.mix(count, rel_k, own_rel_q, rel_q_row());
            changed_by_row.spread(count, queries.rel_q(), queries.rel_q_row(), rel_width, d_rel_k.at.get(),
                                  d_rel_k.row);
        }
        if (x.rel_v) mixed_by_row.spread(count, d_outs.get(), value_width, value_width, d_rel_v.at.get(), d_rel_v.row);
        if (x.rel_bias) changed_by_row.add_to(d_bias.at.get(), count);
    }

    // A query that is not finite may only reach the gradients of the keys that it sees: 0 · NaN is not 0.
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

    // Write the gradients of the queries, or add them to those from the keys of earlier tasks.
    void write_queries(const Task &task, const Task::Piece &piece) const {
        const auto write = [](Real *to, const Real *from, Index width, Real scale, bool adds) {
            for (Index d = 0; d < width; d++) to[d] = from[d] * scale + (adds ? to[d] : 0);
        };
        for (Index i = piece.first; i < piece.end; i++) {
            Real *to = x.d_q.of(task.item, task.head, i);
            write(to, d_q.of(i - piece.first), x.width, queries.scale, piece.goes_on);
            if (queries.apart && x.rel_q)
                write(x.d_rel_q.of(task.item, task.head, i), d_rel_q.of(i - piece.first), x.rel_width, x.rel_scale,
                      piece.goes_on);
            else if (queries.apart)
                write(to, d_rel_q.of(i - piece.first), x.rel_width, x.rel_scale, true);
        }
    }

    // Process a block of queries and a block of keys, `start … start + n - 1`.
    void process(Index item, Index head, Index first, Index count, Index position, Index start, Index n) {
        const Seen seen = sight.of(0, count, position, start, start + n);
        const Index low = seen.low - start, high = seen.high - start;
        if (low >= high) return;
        Real *p = weights.get() + margin, *ds = d_logits.get() + margin;
        if (x.key_table)
            key_side.write(item, head, count, position, start, n, key_panels.get() + (start - packed.first) * x.width,
                           p, logits_row);
        const Weights mixed{p, logits_row, count, position, start, low, high};
        const Weights changed{ds, logits_row, count, position, start, low, high};
        for (Index m = 0; m < count; m += STRIP) {
            const Index rows = std::min(STRIP, count - m);
            const Seen own = sight.of(m, rows, position + m, start, start + n);
            const Index from = own.low - start, to = own.high - start;
            if (from < to) multiply_block(item, head, first, m, rows, position, start, from, to);
            for (Index i = m; i < m + rows; i++) weigh(item, head, first, position, i, start, {from, to}, {low, high});
            if (from < to) mix_queries(m, {ds + m * logits_row, logits_row, rows, position + m, start, from, to});
            if (queries.in_pairs && !TILES) turn(mixed, changed, m, rows);  // while they are in the cache
        }
        if (queries.in_pairs && TILES) turn(mixed, changed, 0, count);
        const Index keys_there = high - low;
        Real *d_keys = d_k.of(start + low - packed.first), *d_values = d_v.of(start + low - packed.first);
        const auto add = [&](const auto &a, const auto &b, Index b_row, Index columns, Real *c, Index c_row) {
            const Index depth = queries.in_pairs ? Joined::depth(count) : count;
            Columns see{0, 0};  // the queries that see some of the keys
            const auto of_keys = [&](Index j, Index some) {
                const Index key = start + low + j;
                while (see.from < count && own_seen(position + see.from).high <= key) see.from++;
                while (see.end < count && own_seen(position + see.end).low < key + some) see.end++;
                return queries.in_pairs ? Joined::pairs(see, depth) : see;
            };
            add_band(keys_there, of_keys, a, b, b_row, columns, c, c_row);
        };
        if (queries.in_pairs) {
            add(turned_weights.from(low), joined_outs.at.get(), joined_outs.row, value_width, d_values, d_v.row);
            add(turned_changes.from(low), joined_queries.at.get(), joined_queries.row, width, d_keys, d_k.row);
        } else {
            add(Matrix{p + low, 1, logits_row}, d_outs.get(), value_width, value_width, d_values, d_v.row);
            add(Matrix{ds + low, 1, logits_row}, queries.same.get(), width, width, d_keys, d_k.row);
        }
        if (x.key_table)
            key_side.pull_back(keys, item, count, position, start + low, keys_there, ds + low, logits_row, d_keys,
                               d_k.row, d_key_table.at.get(), d_key_table.row, key_table);
        if (places) return;
        if (x.rel_k && queries.in_pairs)
            spread_pairs(changed);
        else if (x.rel_k)
            changed.spread(span, queries.rel_q(), queries.rel_q_row(), rel_width, d_rel_k.at.get(), d_rel_k.row);
        if (x.rel_v) mixed.spread(span, d_outs.get(), value_width, value_width, d_rel_v.at.get(), d_rel_v.row);
        if (x.rel_bias) add_to_bias(changed);
    }

    // The keys that a position sees, without labels.
    Seen own_seen(Index position) const { return Seen::of(x, position, position); }

    // Round the weights of some queries, and the gradients of their logits, in the order in which the products with the
    // keys and the table's rows read them.
    void turn(const Weights &mixed, const Weights &changed, Index m, Index rows) {
        const Index p = mixed.p + m, first = mixed.start + mixed.low, end = mixed.start + mixed.high;
        const Seen seen = Seen::of(x, p, p + rows - 1).within(first, end);
        const Index low = seen.low - mixed.start - HIGH, high = seen.high - mixed.start + HIGH;
        turned_weights.take(mixed.at, logits_row, m, rows, low, high);
        turned_changes.take(changed.at, logits_row, m, rows, low, high);
        if (x.rel_k && !places)
            skewed_changes.take(changed.at, logits_row, m, rows, mixed.low - HIGH, mixed.high + HIGH, 1);
    }

    // Add the contribution of pairs of queries to the gradients of the table's rows.
    void spread_pairs(const Weights &changed) {
        const Seen rows = changed.used(span);
        if (!rows.none()) {
            const Index first = rows.low - span.left + changed.p - changed.start;  // the column of the first query
            const auto of_rows = [&](Index i, Index n) {
                return Joined::pairs(changed.using_rows(span, rows.low + i, n), Joined::depth(changed.count));
            };
            add_band(rows.high - rows.low, of_rows, skewed_changes.from(first, 1), joined_queries.at.get(),
                     joined_queries.row, rel_width, d_rel_k.of(rows.low), d_rel_k.row);
        }
        changed.spread_beyond(span, queries.rel_q(), queries.rel_q_row(), rel_width, d_rel_k.at.get(), d_rel_k.row);
    }

    // Write the products of the queries with the keys and the table, and of the outputs' gradients with the values and
    // their table.
    void multiply_block(Index item, Index head, Index first, Index m, Index rows, Index position, Index start,
                        Index from, Index to) {
        const Index p = position + m, low = start + from - (p + rows - 1), high = start + to - p;
        const Index origin = relative.origin(start - (position + height - 1));
        const Index of_values = relative_values.origin(start - (position + height - 1));
        const Index j = floored(from, PANEL), there = start + j - packed.first;  // the first panel
        Real *s = weights.get() + margin + m * logits_row + j, *d = d_logits.get() + margin + m * logits_row + j;
        const auto multiply = [&](const auto &own, const auto &rel_q, const auto &outs) {
            if (relative && !places) relative.write(rel_q, m, rows, low, high, origin);
            const auto of_logits = [&](Index i) {
                MaskRow::fetch(x, item, head, first + m, rows, start + j + i);
                return Start::of(relative, places, m, rows, start + j + i, p, origin, s + i, logits_row,
                                 static_cast<bool>(x.key_table));
            };
            multiply_panels(to - j, rows, queries.depth(), own, key_panels.get() + there * queries.depth(), of_logits,
                            s, logits_row);
            const auto of_weights = [&](Index i) {
                return Start::of(relative_values, places, m, rows, start + j + i, p, of_values, d + i, logits_row);
            };
            multiply_panels(to - j, rows, depth(), outs, value_panels.get() + there * depth(), of_weights, d,
                            logits_row);
        };
        if (relative_values && !places)
            relative_values.multiply(d_outs.get(), value_width, m, rows, low, high, of_values);
        if (queries.in_pairs)
            multiply(queries.pairs.from(m), queries.pairs.from(m), rounded_outs.from(m));
        else
            multiply(Matrix{queries.same.get() + m * queries.row, queries.row, 1},
                     Matrix{queries.rel_q() + m * queries.rel_q_row(), queries.rel_q_row(), 1},
                     Matrix{d_outs.get() + m * value_width, value_width, 1});
    }

    // Turn a row of products into weights and the gradient of the logits, with zeros around both; `there` are the
    // columns that have products, and `all` those of the block.
    void weigh(Index item, Index head, Index first, Index position, Index m, Index start, Seen there, Seen all) {
        const Seen seen = own_seen(position + m);
        Real *s = weights.get() + margin + m * logits_row, *d = d_logits.get() + margin + m * logits_row;
        const Row row{s, std::max(there.low, seen.low - start), std::min(there.high, seen.high - start)};
        const Row changed{d, row.low, row.high};
        if (row.low < row.high) {
            const Real *const sums = x.given_sums.of(item, head, first + m), rest = queries.rest, part = 1 / x.kept;
            for (Index j = row.start(); rest != 1 && j < row.end(); j += LANES) store(s + j, load(s + j) * rest);
            grid.add(m, row, start);
            finish_logits(x, item, head, first + m, row, start, slopes.get() + margin);
            sight.hide(m, row, start);
            const Kept kept = Kept::of(x, item, head, first + m, start);
            const Real origin = lost[m] ? NAN : sums[0] == -INF ? INF : sums[0], log = sums[0] == -INF ? 0 : sums[1];
            const bool differs = x.softcap != 0 || rest != 1;  // the mask's gradient differs from that of the products
            const Row uncapped{differs ? d_added.get() + margin : d, row.low, row.high};
            for (Index j = row.start(); j < row.end(); j += LANES) {
                const Vec weight = exponential(load(s + j) - origin - log), here = kept ? kept.at(j) * part : splat(1);
                Vec change = weight * (load(d + j) * here - delta[m]);
                change = weight == Vec{} ? Vec{} : change;  // hidden entries may hold anything
                if (differs) store(uncapped.at + j, change);
                if (x.softcap != 0) change = weight == Vec{} ? Vec{} : change * load(slopes.get() + margin + j);
                store(s + j, weight * here);
                store(d + j, change * rest);
            }
            if (x.d_added) add_to_mask(item, head, first + m, uncapped, start);
            grid.take_changes(m, changed, start);
        }
        if (lost[m]) row.put_around(0), changed.put_around(0);
        if (changed_by_row && row.low < row.high) changed_by_row.add(m, changed, start);
        if (mixed_by_row && row.low < row.high) mixed_by_row.add(m, row, start);
        row.clear_around(s + (all.low - zeros_before), s + (all.high + zeros_after));
        changed.clear_around(d + (all.low - zeros_before), d + (all.high + zeros_after));
    }

    // Add a row of the logits' gradients to those of the mask; `first` is the key of column 0.
    void add_to_mask(Index item, Index head, Index query, const Row &row, Index first) const {
        const bool is_own = has_own_mask();
        Real *to =
            is_own ? x.d_added.of(item, head, query) : d_mask.of(x.added.sizes[2] == 1 ? 0 : query - task_queries.low);
        if (x.added.sizes[3] == 1) {  // there are zeros around the row
            Vec total{};
            for (Index j = row.start(); j < row.end(); j += LANES) total += load(row.at + j);
            *to += ::sum(total);
            return;
        }
        to += is_own ? first : first - packed.first;
        Index j = row.low;
        for (; j + LANES <= row.high; j += LANES) store(to + j, load(to + j) + load(row.at + j));
        for (; j < row.high; j++) to[j] += row.at[j];
    }

    void mix_queries(Index m, const Weights &changed) {
        if (queries.in_pairs) return mix_pairs(m, changed);
        add_product(changed.count, changed.high - changed.low, Matrix{changed.at + changed.low, logits_row, 1},
                    keys.of(changed.start + changed.low), keys.row, width, own_q + m * d_q.row, d_q.row);
        if (x.rel_k && !places)
            changed.mix(span, rel_k.of(0), rel_k.row, rel_width, own_rel_q + m * rel_q_row(), rel_q_row());
    }

    void mix_pairs(Index m, const Weights &changed) {
        const Index around = x.rel_k ? STRIP : 0, first = changed.start + changed.low,
                    end = changed.start + changed.high;
        Real *own = own_q + m * d_q.row;
        rounded_changes.take(changed.at, logits_row, changed.count, changed.low - around, changed.high + around);
        key_pairs.mix(changed.count, changed.at, logits_row, rounded_changes.from(0), changed.low, first, end, own,
                      d_q.row);
        if (!x.rel_k) return;
        const auto [c, stop] = changed.used(span);
        table_pairs.mix(changed.count, changed.at, logits_row + 1, rounded_changes.from(0, 1),
                        c - span.left + changed.p - changed.start, c, stop, own, d_q.row);
        changed.mix_beyond(span, rel_k.of(0), rel_k.row, rel_width, own, d_q.row);
    }

    Index rel_q_row() const { return queries.apart ? d_rel_q.row : d_q.row; }

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

inline bool backward(const Problem &x, Tasks &tasks) {
    Backward work(x, tasks);
    if (!work.make()) return false;
    work.run();
    return true;
}

}  // namespace
