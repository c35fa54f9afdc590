#include "integers.hpp"

namespace {

constexpr Index NEAR = Index{1} << 30;      // integers this near to one another are only shifted
constexpr Index FURTHEST = Index{1} << 61;  // of positions: none of their differences overflows
constexpr Index MOST = (Index{1} << 31) - 2;

// The integers of a set, in order, and those that replace them.
struct Ranks {
    Memory<Index> all, labels;
    Index count = 0;

    bool make(Index most) {
        all = memory<Index>(most), labels = memory<Index>(most);
        return all && labels;
    }

    // Replace the first `size` numbers: the distance of two neighbours is at most a step. False if they do not fit.
    bool number(Index size, Index step) {
        count = size;
        std::sort(all.get(), all.get() + count);
        for (Index i = 1; i < count; i++) labels[i] = labels[i - 1] + std::min(step, distance(all[i - 1], all[i]));
        return !count || labels[count - 1] <= MOST;
    }

    std::int32_t label(Index x) const {
        const Index i = place(x);
        return i < count && all[i] == x ? static_cast<std::int32_t>(labels[i]) : -1;
    }

    // The labels of the numbers low … high; none, with the higher one first, if there is no number.
    Limits between(Index low, Index high) const {
        const Index from = place(low), end = std::upper_bound(all.get(), all.get() + count, high) - all.get();
        if (from >= end) return {1, 0};
        return {static_cast<std::int32_t>(labels[from]), static_cast<std::int32_t>(labels[end - 1])};
    }

    static Index distance(Index low, Index high) {  // may be more than a signed number holds
        const auto found = static_cast<std::uint64_t>(high) - static_cast<std::uint64_t>(low);
        return static_cast<Index>(std::min<std::uint64_t>(found, FURTHEST));
    }

private:
    Index place(Index x) const { return std::lower_bound(all.get(), all.get() + count, x) - all.get(); }
};

struct Ends {
    Index low, high;
};

Index value(const Integers &x, Index item, Index i, bool is_position) {
    return is_position ? std::clamp(x(item, i), -FURTHEST, FURTHEST) : x(item, i);
}

Ends ends_of(const Integers &x, Index count, bool are_positions) {
    Ends found{value(x, 0, 0, are_positions), value(x, 0, 0, are_positions)};
    for (Index item = 0; item < x.sizes[0]; item++)
        for (Index i = 0; i < count; i++) {
            const Index own = value(x, item, i, are_positions);
            found = {std::min(found.low, own), std::max(found.high, own)};
        }
    return found;
}

}  // namespace

const char *Narrowed::make(const Sizes &x, const Integers &q, const Integers &k, bool are_positions) {
    if (!q || !k || !x.queries || !x.keys) return nullptr;
    const Ends of_q = ends_of(q, x.queries, are_positions), of_k = ends_of(k, x.keys, are_positions);
    const Ends all{std::min(of_q.low, of_k.low), std::max(of_q.high, of_k.high)};
    if (are_positions) low = of_k.low - of_q.high, high = of_k.high - of_q.low;
    const bool near = Ranks::distance(all.low, all.high) < NEAR;
    // Of positions far apart, one after the other, what two are further apart than any table reaches is left out.
    const bool apart = !near && are_positions;
    const Index items = std::max(q.sizes[0], k.sizes[0]), row = x.keys + SPARE;
    const Index q_items = apart ? items : q.sizes[0], k_items = apart ? items : k.sizes[0];
    queries = memory<std::int32_t>(q_items * x.queries), keys = memory<std::int32_t>(k_items * row);
    if (are_positions) limits = memory<Limits>(q_items * x.queries);
    Ranks ranks;
    if (!queries || !keys || (are_positions && !limits)) return NO_MEMORY;
    if (!near && !ranks.make(apart ? x.queries + x.keys : k.sizes[0] * x.keys)) return NO_MEMORY;
    for (Index item = 0, count = 0; !near && !apart && item < k.sizes[0]; item++)  // of segments, ranks
        for (Index j = 0; j < x.keys; j++) ranks.all[count++] = k(item, j);
    if (!near && !apart && !ranks.number(k.sizes[0] * x.keys, 1)) return "there are too many segments";
    const auto label = [&](Index own) { return near ? static_cast<std::int32_t>(own - all.low) : ranks.label(own); };
    const auto seen = [&](Index own) -> Limits {
        const Seen there = Seen::positions(x, own, own);
        if (apart) return ranks.between(there.low, there.high - 1);
        const auto held = [&](Index p) { return static_cast<std::int32_t>(std::clamp<Index>(p, -1, MOST)); };
        return {held(there.low - all.low), held(there.high - 1 - all.low)};
    };
    for (Index item = 0; item < std::max(q_items, k_items); item++) {
        if (apart) {
            for (Index i = 0; i < x.queries; i++) ranks.all[i] = value(q, item, i, true);
            for (Index j = 0; j < x.keys; j++) ranks.all[x.queries + j] = value(k, item, j, true);
            if (!ranks.number(x.queries + x.keys, std::max(x.left, x.rows - 1 - x.left) + 1))
                return "positions are too far apart for a table of this length";
        }
        for (Index i = 0; item < q_items && i < x.queries; i++) {
            const Index own = value(q, item, i, are_positions), place = item * x.queries + i;
            queries[place] = label(own);
            if (are_positions) limits[place] = seen(own);
        }
        for (Index j = 0; item < k_items && j < x.keys; j++)
            keys[item * row + j] = label(value(k, item, j, are_positions));
    }
    const auto lay = [](auto &to, const auto &from, Index count, Index step) {
        to.at = from.get(), to.item = count > 1 ? step : 0, to.column = 1;
    };
    lay(of_queries, queries, q_items, x.queries), lay(of_keys, keys, k_items, row);
    lay(of_limits, limits, q_items, x.queries);
    return nullptr;
}
