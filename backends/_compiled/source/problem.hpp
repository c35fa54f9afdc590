// One call of relative attention as the kernels receive it: numbers, and arrays as addresses and strides in entries.
// Each is declared here, with its name and the sizes of its axes; Python and XLA pass them in this order.
//
// An array that is added takes a line of ARRAYS, and what the kernels do with it.
#pragma once

#include <algorithm>

#include "half.hpp"

using Index = std::int64_t;

constexpr Index FAR = Index{1} << 40;        // the limit of offsets, and of the sides of grids
constexpr Index UNBOUNDED = Index{1} << 62;  // how far a query sees without a window: beyond every distance
constexpr Index BLOCK = 48;                  // queries of a head processed at once, or twice as many
constexpr Index SPARE = 16;                  // padding of the keys' integers, for the longest vectors

template <class T>
struct Array {
    T *at = nullptr;
    Index item = 0, head = 0, row = 0, column = 0;  // strides; 0 along an axis of length 1, which broadcasts
    Index sizes[4] = {1, 1, 1, 1};                  // of its axes, as passed

    explicit operator bool() const { return at != nullptr; }
    T *of(Index i, Index h, Index r = 0) const { return at + i * item + h * head + r * row; }

    // Whether another item and head have other rows.
    bool moved(Index i, Index h, Index other_i, Index other_h) const { return of(i, h) != of(other_i, other_h); }
};

// Integers as they are given, of 32 or 64 bits.
struct Integers : Array<const std::int32_t> {
    bool wide = false;

    Index operator()(Index i, Index j) const {
        const Index place = i * item + j * column;
        return wide ? reinterpret_cast<const std::int64_t *>(at)[place] : at[place];
    }
};

// The lowest and the highest of the keys' integers that a query sees.
struct Limits {
    std::int32_t low, high;
};

// The length of an axis: WHOLE is this length, and ROWS that of the tables; ANY is this length or 1; OF_ENTRY is that
// for each entry of a mapped call, or 1; NONE is no axis.
struct Axis {
    enum Kind { WHOLE, ROWS, ANY, OF_ENTRY, NONE };
    Index size = 1;
    Kind kind = WHOLE;
};

struct Axes {
    Axis item, head, row, column;
};

enum class Need { MUST, MAY, NOT };

constexpr const char *NO_MEMORY = "not enough memory";

// The arrays of a call, except for its mask: the name, the axes, and whether a call has it. The gradient of x is d_x.
#define ARRAYS(EACH)                                                           \
    EACH(q, rows_of(width), Need::MUST)                                        \
    EACH(k, keys_of(width), in_int8 ? Need::NOT : Need::MUST)                  \
    EACH(v, keys_of(value_width), in_int8 ? Need::NOT : Need::MUST)            \
    EACH(rel_k, table(rel_width), rel_k_in_int8 ? Need::NOT : Need::MAY)       \
    EACH(rel_v, table(value_width), rel_v_in_int8 ? Need::NOT : Need::MAY)     \
    EACH(rel_bias, (Axes{of_entry(), any(heads), NONE, of_rows()}), Need::MAY) \
    EACH(rel_q, rows_of(rel_width), Need::MAY)                                 \
    EACH(key_table, table(width), Need::MAY)                                   \
    EACH(axis_tables, (Axes{of_entry(), any(heads), {sides_fit() ? axis_rows() : -1}, {width}}), Need::MAY)

// One side of a grid of queries and of a grid of keys, and the distance of neighbours, in rows of the side's table. Row
// c is for the relative position c minus that of the first key and the last query. A query sees the keys that are at
// most `before` back and `after` ahead; if it `shifts`, the range is moved into the grid at borders.
struct Side {
    Index queries = 0, keys = 0, query_step = 0, key_step = 0;
    Index offset = 0;  // the place of query 0, with key 0 at place 0
    Index before = 0, after = 0, shifts = 0;

    Index rows() const { return keys ? (queries - 1) * query_step + (keys - 1) * key_step + 1 : 0; }
    bool hides() const { return keys && (before < FAR || after < FAR); }
};

struct Sizes {
    Index items, heads, key_heads, queries, keys, width, rel_width, value_width;
    Index rows, left;     // of the tables: row c is for the relative position c - left
    Index clip;           // whether edge rows repeat beyond the table; else nothing is added there
    Index before, after;  // a query sees the relative positions -before … after; UNBOUNDED: all,
    Index block, behind;  // of those in its block of this size and in this many blocks behind; block 0: no blocks
    Index offset;         // the position of query 0
    Index mask_adds;      // whether a mask is to be added
    Index in_int8 = 0;    // whether keys and values are `k_int8` and `v_int8`
    Index rel_k_in_int8 = 0, rel_v_in_int8 = 0;  // and the tables
    Index threshold;                             // dropout: the hash of a weight that is kept reaches this
    Index entries = 1;  // of a mapped call: each has the same number of items, and separate tables

    static constexpr Index SIDES = 4;
    // of the grids whose cells, row by row, are the last queries and keys; missing sides come first and are 0
    Side sides[SIDES];

    // Bound what a query sees by its blocks, and all by what can be counted.
    void bound() {
        before = std::min(before, UNBOUNDED), after = std::min(after, UNBOUNDED), block = std::min(block, UNBOUNDED);
        if (block <= 0 || behind < 0) return;
        const Index most = UNBOUNDED / block;
        if (behind < most) before = std::min(before, (behind + 1) * block - 1);
        behind = std::min(behind, most), after = std::min(after, block - 1);
    }

    // The number of cells of queries, or of keys.
    Index cells(Index Side::*of) const {
        Index count = 1;
        for (const Side &side : sides) count *= std::max<Index>(1, side.*of);
        return count;
    }
    bool on_grids() const {
        for (const Side &side : sides)
            if (side.queries || side.keys) return true;
        return false;
    }
    // Whether queries see a part of the grid of keys.
    bool windowed() const {
        for (const Side &side : sides)
            if (side.hides()) return true;
        return false;
    }
    Index axis_rows() const {
        Index count = 0;
        for (const Side &side : sides) count += side.rows();
        return count;
    }
    Index group() const { return heads / key_heads; }
    Index entry(Index item) const { return item / (items / entries); }
};

template <class Stored>
struct ProblemOf : Sizes {
    using Real = typename Computed<Stored>::Real;

    Real kept;                       // the share of the weights that dropout keeps
    Real scale, rel_scale, softcap;  // softcap 0: none

#define FIELDS(NAME, AXES, NEED) \
    Array<const Stored> NAME;    \
    Array<Real> d_##NAME;
    ARRAYS(FIELDS)
#undef FIELDS
    Array<const Stored> added;  // a mask, and its gradient
    Array<Real> d_added;
    Array<const unsigned char> seen;  // a boolean mask

    // Keys, values and tables, each row of which is multiplied by its scale. Tables are only read so by few queries.
    Array<const std::int8_t> k_int8, v_int8, rel_k_int8, rel_v_int8;
    Array<const float> k_scale, v_scale, rel_k_scale, rel_v_scale;

    // The segments of queries and keys: a query sees the keys of its segment. Their positions, unless consecutive.
    Integers segments[2], positions[2];

    // Dropout keeps a weight if the mixed hashes of its query and its key reach the threshold.
    Array<const std::int32_t> query_hashes, given_key_hashes;

    // What the kernels read instead (integers.hpp): integers of 32 bits, those of the keys padded, and the positions
    // that a query sees.
    Array<const std::int32_t> q_segments, k_segments, q_positions, k_positions, key_hashes;
    Array<const Limits> q_limits;

    // The results. Two numbers for each query are the largest logit, and the logarithm of the sum of the weights
    // relative to it: next to a large number, their sum, the log-sum-exp, could not hold the second.
    Array<Stored> out;
    Array<Real> lse, sums;

    // The inputs of the backward pass.
    Array<const Stored> d_out, given_out;
    Array<const Real> given_sums, d_lse;

    // Visit the numbers: keys and offset first, because they change from token to token.
    template <class Visit>
    void numbers(Visit &&visit) {
        visit("keys", keys), visit("offset", offset), visit("items", items), visit("heads", heads);
        visit("key_heads", key_heads), visit("queries", queries), visit("width", width), visit("rel_width", rel_width);
        visit("value_width", value_width), visit("rows", rows), visit("left", left), visit("clip", clip);
        visit("before", before), visit("after", after), visit("block", block), visit("behind", behind);
        visit("mask_adds", mask_adds), visit("threshold", threshold);
        constexpr const char *NAMES[SIDES][8] = {
            {"queries_0", "keys_0", "query_step_0", "key_step_0", "offset_0", "before_0", "after_0", "shifts_0"},
            {"queries_1", "keys_1", "query_step_1", "key_step_1", "offset_1", "before_1", "after_1", "shifts_1"},
            {"queries_2", "keys_2", "query_step_2", "key_step_2", "offset_2", "before_2", "after_2", "shifts_2"},
            {"queries_3", "keys_3", "query_step_3", "key_step_3", "offset_3", "before_3", "after_3", "shifts_3"},
        };
        for (Index side = 0; side < SIDES; side++) {
            auto &[n, m, query_step, key_step, start, back, ahead, shifts] = sides[side];
            Index *const own[] = {&n, &m, &query_step, &key_step, &start, &back, &ahead, &shifts};
            for (int i = 0; i < 8; i++) visit(NAMES[side][i], *own[i]);
        }
        visit("scale", scale), visit("rel_scale", rel_scale), visit("softcap", softcap), visit("kept", kept);
    }

    // Visit the arrays that a call gets, until a visit returns false.
    template <class Visit>
    bool arrays(Visit &&visit) {
#define VISIT(NAME, AXES, NEED) visit(#NAME, NAME, NEED, AXES) &&
        return ARRAYS(VISIT)(mask_adds ? visit("mask", added, Need::MAY, mask())
                                       : visit("mask", seen, Need::MAY, mask()));
#undef VISIT
    }

    // Visit the arrays in int8, which only hosts without Python pass.
    template <class Visit>
    bool quantised(Visit &&visit) {
        const auto both = [&](bool there, const char *name, auto &to, const Axes &axes, const char *scale_name,
                              auto &scales) {
            return !there || (visit(name, to, Need::MUST, axes) &&
                              visit(scale_name, scales, Need::MUST, Axes{axes.item, axes.head, axes.row, NONE}));
        };
        return both(in_int8, "k", k_int8, keys_of(width), "k_scale", k_scale) &&
               both(in_int8, "v", v_int8, keys_of(value_width), "v_scale", v_scale) &&
               both(rel_k_in_int8, "rel_k", rel_k_int8, table(rel_width), "rel_k_scale", rel_k_scale) &&
               both(rel_v_in_int8, "rel_v", rel_v_int8, table(value_width), "rel_v_scale", rel_v_scale);
    }

    bool has_rel_k() const { return rel_k || rel_k_int8; }
    bool has_rel_v() const { return rel_v || rel_v_int8; }

    // Visit the integers of queries and keys.
    template <class Visit>
    bool integers(Visit &&visit) {
        const Axes of_queries{any(items), NONE, NONE, {queries}}, of_keys{any(items), NONE, NONE, {keys}};
        return visit("q_segments", segments[0], Need::MAY, of_queries) &&
               visit("k_segments", segments[1], as(segments[0]), of_keys) &&
               visit("q_positions", positions[0], Need::MAY, of_queries) &&
               visit("k_positions", positions[1], as(positions[0]), of_keys) &&
               visit("query_hashes", query_hashes, Need::MAY, Axes{{items}, {heads}, {queries}, {1}}) &&
               visit("key_hashes", given_key_hashes, as(query_hashes), Axes{of_entry(), NONE, NONE, {keys}});
    }

    // Visit the results of the forward pass.
    template <class Visit>
    bool results(Visit &&visit) {
        return visit("out", out, Need::MUST, rows_of(value_width)) && visit("lse", lse, Need::MAY, numbers_of_rows()) &&
               visit("sums", sums, Need::MAY, rows_of(2));
    }

    // Visit the further arguments of the backward pass.
    template <class Visit>
    bool cotangents(Visit &&visit) {
        return visit("d_out", d_out, Need::MUST, rows_of(value_width)) &&
               visit("out", given_out, Need::MUST, rows_of(value_width)) &&
               visit("sums", given_sums, Need::MUST, rows_of(2)) && visit("d_lse", d_lse, Need::MAY, numbers_of_rows());
    }

    // Visit the gradients, by the names of the arrays. Those of tables and masks are added to the given arrays.
    template <class Visit>
    bool gradients(Visit &&visit) {
#define VISIT(NAME, AXES, NEED) visit(#NAME, d_##NAME, as(NAME), of_gradient(NAME, AXES)) &&
        return ARRAYS(VISIT) visit("mask", d_added, added ? Need::MAY : Need::NOT, of_gradient(added, mask()));
#undef VISIT
    }

    // Return what is wrong with the numbers, or null: no index computed from them may overflow.
    const char *wrong() const {
        constexpr Index LARGEST = Index{1} << 61;
        for (Index size : {items, heads, key_heads, queries, width, value_width, rows, entries})
            if (size < 1) return "a size is less than 1";
        for (Index far : {left, rows})
            if (far < -LARGEST || far > LARGEST) return "a relative position is too far away";
        for (Index far : {before, after})
            if (far < -UNBOUNDED || far > UNBOUNDED) return "a relative position is too far away";
        if (offset <= -FAR || offset >= FAR) return "the offset is too large";
        if (keys < 0 || rel_width < 0 || block < 0 || behind < 0) return "a number of the call is invalid";
        if (heads % key_heads || items % entries)
            return "`heads` must be a multiple of `key_heads`, and `items` of `entries`";
        if (has_rel_k() && !rel_q && rel_width != width) return "queries and the table must have the same width";
        if (axis_tables && rel_width != width) return "queries and the tables of the axes must have the same width";
        if ((axis_tables || on_grids()) && !sides_fit()) return "the sides of the grids do not fit the call";
        if (positions[1] && rows > Index{1} << 30) return "positions support no table with more than 2**30 rows";
        return nullptr;
    }

    // Whether no memory can hold the scratch arrays, or only sizes that overflow.
    bool is_too_large() const {
        const double rows_there = static_cast<double>(queries) + static_cast<double>(keys);
        return static_cast<double>(items) * static_cast<double>(heads) * rows_there *
                   static_cast<double>(width + rel_width + value_width) >
               0x1p56;
    }

    // Skip the rows of tables that no query uses: there may be very many, and the kernels pack all rows.
    void narrow() {
        const Index lowest = k_positions ? -before : std::max(-before, 1 - offset - queries);
        const Index highest = k_positions ? after : std::min(after, keys - 1 - offset);
        const Index first = std::clamp<Index>(lowest + left, 0, rows - 1);  // edges included
        rows = std::clamp<Index>(highest + left + 1, first + 1, rows) - first, left -= first;
        const auto move = [first](const Axes &axes, auto &...tables) {
            const bool is_row = axes.row.kind == Axis::ROWS, is_column = axes.column.kind == Axis::ROWS;
            (..., (tables.at += tables ? first * (is_row ? tables.row : is_column) : 0));
        };
#define MOVE(NAME, AXES, NEED) move(AXES, NAME, d_##NAME);
        ARRAYS(MOVE)
#undef MOVE
        move(table(1), rel_k_int8, rel_k_scale, rel_v_int8, rel_v_scale);
    }

private:
    // Whether the cells of the grids are queries and keys, and no index computed from them overflows.
    bool sides_fit() const {
        Index of_queries = queries, of_keys = keys;
        bool more = true;
        for (Index side = SIDES - 1; side >= 0; side--) {
            const auto [n, m, query_step, key_step, start, back, ahead, shifts] = sides[side];
            if (!n && !m && side < SIDES - 1) {
                more = false;
                continue;
            }
            if (!more || n < 1 || m < 1 || query_step < 1 || key_step < 1) return false;
            of_queries /= n, of_keys /= m;
            if (!of_queries || !of_keys || query_step > FAR / n || key_step > FAR / m) return false;
            if (start <= -FAR || start >= FAR || back < 0 || ahead < 0 || back > FAR || ahead > FAR) return false;
            if (shifts && back + ahead >= m) return false;
        }
        return true;
    }

    static constexpr Axis NONE{1, Axis::NONE};

    static Axis any(Index size) { return {size, Axis::ANY}; }
    Axis of_entry() const { return {entries, Axis::OF_ENTRY}; }
    Axis of_rows() const { return {rows, Axis::ROWS}; }
    Axes table(Index columns) const { return {of_entry(), any(heads), of_rows(), {columns}}; }
    Axes mask() const { return {any(items), any(heads), any(queries), any(keys)}; }
    Axes rows_of(Index columns) const { return {{items}, {heads}, {queries}, {columns}}; }
    Axes keys_of(Index columns) const { return {{items}, {key_heads}, {keys}, {columns}}; }
    Axes numbers_of_rows() const { return {{items}, {heads}, {queries}, NONE}; }
    Axes of_gradient(const Array<const Stored> &x, const Axes &axes) const {
        const auto &[of_items, of_heads, rows_of_x, columns] = x.sizes;
        return {{axes.item.kind == Axis::OF_ENTRY ? entries : of_items},
                {of_heads},
                axes.row.kind == Axis::NONE ? NONE : Axis{rows_of_x},
                {columns}};
    }

    template <class T>
    static Need as(const Array<T> &other) {
        return other ? Need::MUST : Need::NOT;
    }
};

// An array as passed, with strides in entries.
struct View {
    void *at;
    int count;
    Index sizes[4], steps[4];
    Index bytes = 0;  // of an entry, where its type leaves that open
};

// Store a view as an array of the call, or return what is wrong with its sizes. Leading axes of length 1 may be
// missing.
template <class T>
const char *place(const View &from, const Axes &axes, Array<T> &to) {
    const Axis *wanted[] = {&axes.item, &axes.head, &axes.row, &axes.column};
    Index *steps[] = {&to.item, &to.head, &to.row, &to.column};
    int next = from.count - 1;
    bool empty = false;
    for (int i = 3; i >= 0; i--) {
        if (wanted[i]->kind == Axis::NONE && from.count < 4) continue;
        const Index size = next < 0 ? 1 : from.sizes[next], step = next < 0 ? 0 : from.steps[next];
        if (size != wanted[i]->size && (size != 1 || wanted[i]->kind <= Axis::ROWS))
            return "has a different size from the one its call declares";
        *steps[i] = size == 1 ? 0 : step, to.sizes[i] = size;
        empty = empty || size == 0;
        next--;
    }
    if (next >= 0) return "has too many axes";
    if (!from.at && !empty) return "has no memory";
    if (empty) to = {};
    to.at = static_cast<T *>(from.at);
    return nullptr;
}
