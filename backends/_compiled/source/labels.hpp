// Integers of keys and queries that decide which keys a query sees: positions or segments.
#pragma once

#include "relative.hpp"

namespace {

// The lowest and the highest of some integers.
struct Bounds {
    static constexpr Index LEAST = std::numeric_limits<std::int32_t>::min(),
                           MOST = std::numeric_limits<std::int32_t>::max();
    std::int32_t low = MOST, high = LEAST;
    bool rises = false;  // whether each is one more than its predecessor

    static Bounds of(const std::int32_t *x, Index count) {
        Bounds found;
        for (Index i = 0; i < count; i++) found.take({x[i], x[i]});
        found.rises = found.high - Index{found.low} == count - 1;
        for (Index i = 0; i < count; i++) found.rises = found.rises && x[i] - Index{found.low} == i;
        return found;
    }

    void take(Bounds others) { low = std::min(low, others.low), high = std::max(high, others.high); }
};

// A mask that is the same for all queries of an item, such as padding: keys that it hides at both ends are skipped.
struct Padding {
    const Problem &x;
    const bool here;
    Memory<Index> firsts,
        ends;  // for each key, the first visible key from it on, and the end of the last one before it
    Index item = -1;

    explicit Padding(const Problem &x) : x(x), here(is_of_keys(x.seen) || is_of_keys(x.added)) {}

    bool make() {
        if (!here) return true;
        firsts = memory<Index>(x.keys + 1);
        ends = memory<Index>(x.keys + 1);
        return firsts && ends;
    }

    void take_keys(Index of) {
        const bool known = item >= 0 && !x.seen.moved(item, 0, of, 0) && !x.added.moved(item, 0, of, 0);
        if (!here || known) return;
        item = of, firsts[x.keys] = x.keys, ends[0] = 0;
        const MaskRow mask = MaskRow::of(x, item, 0, 0);
        for (Index j = 0; j < x.keys; j++) ends[j + 1] = mask.leaves(j) ? j + 1 : ends[j];
        for (Index j = x.keys - 1; j >= 0; j--) firsts[j] = mask.leaves(j) ? j : firsts[j + 1];
    }

    void narrow(Seen &there) const {
        if (here && !there.none()) there = {firsts[there.low], ends[there.high]};
    }

private:
    template <class T>
    static bool is_of_keys(const Array<T> &mask) {
        return mask && mask.head == 0 && mask.row == 0 && mask.sizes[3] > 1;
    }
};

// The labels of an item's keys and of a block of queries, if there are any.
struct Labels {
    const Problem &x;
    const Array<const std::int32_t> of_queries, of_keys;
    const Array<const Limits> of_limits;  // of positions; segments must be equal
    const std::int32_t *keys = nullptr, *queries = nullptr;
    const Limits *limits = nullptr;
    Memory<Bounds> vectors;  // of LANES keys each
    Bounds all;              // of all keys

    Labels(const Problem &x, Array<const std::int32_t> of_queries, Array<const std::int32_t> of_keys,
           Array<const Limits> of_limits = {})
        : x(x), of_queries(of_queries), of_keys(of_keys), of_limits(of_limits) {}

    explicit operator bool() const { return static_cast<bool>(of_keys); }

    bool make() {
        if (*this) vectors = memory<Bounds>(x.keys / LANES + 1);
        return vectors || !*this;
    }

    void take_keys(Index item) {
        if (!*this || (keys && !of_keys.item)) return;
        take(of_keys.of(item, 0));
    }

    void take(const std::int32_t *of_all_keys) {
        keys = of_all_keys, all = Bounds();
        for (Index j = 0; j < x.keys; j += LANES)
            all.take(vectors[j / LANES] = Bounds::of(keys + j, std::min<Index>(LANES, x.keys - j)));
    }

    void take_queries(Index item, Index first) {
        if (*this) queries = of_queries.of(item, 0) + first;
        if (of_limits) limits = of_limits.of(item, 0) + first;
    }

    // The range of labels that a query of the block sees.
    Bounds seen(Index m) const {
        return limits ? Bounds{limits[m].low, limits[m].high} : Bounds{queries[m], queries[m]};
    }

    // Skip vectors of keys, at both ends, that none of these queries sees.
    void narrow(Index m, Index rows, Seen &there) const {
        if (!*this) return;
        Bounds seen;
        for (Index i = m; i < m + rows; i++) seen.take(this->seen(i));
        const auto none = [&](Index key) {
            const Bounds own = vectors[key / LANES];
            return own.high < seen.low || seen.high < own.low;
        };
        while (!there.none() && none(there.low)) there.low = floored(there.low, LANES) + LANES;
        while (!there.none() && none(there.high - 1)) there.high = floored(there.high - 1, LANES);
    }

    // Hide the keys of a row that its query does not see; `first` is the key of column 0.
    void hide(Index m, const Row &row, Index first) const {
        if (!*this) return;
        const Bounds seen = this->seen(m);
        for (Index j = row.start(); j < row.end(); j += LANES) {
            const Bounds own = vectors[(first + j) / LANES];
            if (seen.low <= own.low && own.high <= seen.high) continue;
            const Ints labels = load_ints(keys + first + j);
            store(row.at + j, ((labels >= seen.low) & (labels <= seen.high)) ? load(row.at + j) : splat(-INF));
        }
    }
};

}  // namespace
