// The steps on a row of logits between the products: softcap, masks and softmax.
#pragma once

#include "tile.hpp"

namespace {

// A row of logits, of which the keys low … high - 1 are visible; up to LANES numbers around them are overwritten.
struct Row {
    Real *at;
    Index low, high;

    Index start() const { return floored(low, LANES); }
    Index end() const { return padded(high); }

    void put_around(Real x) const {
        for (Index j = start(); j < low; j++) at[j] = x;
        for (Index j = high; j < end(); j++) at[j] = x;
    }

    // Write zeros between two addresses, except inside the row.
    void clear_around(Real *from, Real *to) const {
        if (low >= high) {
            std::fill(from, to, 0);
            return;
        }
        if (from < at + start()) std::fill(from, at + start(), 0);
        if (at + end() < to) std::fill(at + end(), to, 0);
    }
};

// The entries of a mask for one query.
struct MaskRow {
    const Stored *added = nullptr;
    const unsigned char *seen = nullptr;
    Index step = 0;

    static MaskRow of(const Problem &x, Index item, Index head, Index query) {
        MaskRow row;
        if (x.added) row.added = x.added.of(item, head, query), row.step = x.added.column;
        if (x.seen) row.seen = x.seen.of(item, head, query), row.step = x.seen.column;
        return row;
    }

    // Prefetch the entries of PANEL keys: a mask by query and key is read once, from distant memory, in pieces of rows.
    static void fetch(const Problem &x, Index item, Index head, Index query, Index rows, Index key) {
        for (Index i = query; x.added.row && i < query + rows; i++)
            __builtin_prefetch(x.added.of(item, head, i) + key * x.added.column);
        for (Index i = query; x.seen.row && i < query + rows; i++)
            __builtin_prefetch(x.seen.of(item, head, i) + key * x.seen.column);
    }

    // Whether the mask leaves a key visible.
    bool leaves(Index key) const { return seen ? seen[key * step] != 0 : added[key * step] != -INF; }

    void hide(const Row &row, Index first) const {
        if (step == 1)  // a separate loop, which compilers vectorise
            hide(row, first, 1);
        else
            hide(row, first, step);
    }

private:
    [[gnu::always_inline]] void hide(const Row &row, Index first, Index step) const {
        if (seen)
            for (Index j = row.low; j < row.high; j++) row.at[j] = seen[(first + j) * step] ? row.at[j] : -INF;
        if (added)
            for (Index j = row.low; j < row.high; j++) {
                const Real x = added[(first + j) * step];
                row.at[j] = x == -INF ? -INF : row.at[j] + x;
            }
    }
};

// Turn the products of a query into logits; `first` is the key of column 0. The slopes say by how much each logit
// follows its product through a softcap.
inline void finish_logits(const Problem &x, Index item, Index head, Index query, const Row &row, Index first,
                          Real *slopes = nullptr) {
    if (x.softcap != 0) {
        const Real cap = x.softcap, part = 1 / cap;
        for (Index j = row.start(); j < row.end(); j += LANES) {
            const Vec t = hyperbolic_tangent(load(row.at + j) * part);
            store(row.at + j, t * cap);
            if (slopes) store(slopes + j, splat(1) - t * t);
        }
    }
    MaskRow::of(x, item, head, query).hide(row, first);
    row.put_around(-INF);
}

// Which weights of a query dropout keeps, as in relskew_core._kernel.dropout.
struct Kept {
    const std::int32_t *keys;
    std::int32_t query, threshold;

    static Kept of(const Problem &x, Index item, Index head, Index query, Index first_key) {
        if (!x.key_hashes) return {nullptr, 0, 0};
        return {x.key_hashes.of(x.entry(item), 0) + first_key, *x.query_hashes.of(item, head, query),
                static_cast<std::int32_t>(x.threshold)};
    }

    explicit operator bool() const { return keys != nullptr; }

    // Return 1 for each of LANES keys that is kept, else 0.
    Vec at(Index j) const {
        Words x = load_words(keys + j) ^ static_cast<std::uint32_t>(query);
        x = (x ^ (x >> 16)) * 0x85EBCA6Bu;
        x = (x ^ (x >> 13)) * 0xC2B2AE35u;
        return widened(x) >= threshold ? splat(1) : Vec{};
    }

    // Replace the weights of a row that are dropped by zeros.
    void drop(const Row &row) const {
        if (!keys) return;
        for (Index j = row.start(); j < row.end(); j += LANES) store(row.at + j, load(row.at + j) * at(j));
    }
};

// The softmax of a row, accumulated over blocks of keys.
struct Softmax {
    Real most = -INF, total = 0;

    // Replace logits by weights before the division by the total; return the factor for the weights of earlier blocks.
    Real take(const Row &row) {
        Vec a[4] = {splat(-INF), splat(-INF), splat(-INF), splat(-INF)};  // chains that do not wait for each other
        Index j = row.start();
        for (; j + 4 * LANES <= row.end(); j += 4 * LANES)
            for (int i = 0; i < 4; i++) a[i] = larger(load(row.at + j + i * LANES), a[i]);
        for (; j < row.end(); j += LANES) a[0] = larger(load(row.at + j), a[0]);
        const Real before = most, now = std::max(most, largest(larger(larger(a[0], a[1]), larger(a[2], a[3]))));
        const Real origin = now == -INF ? 0 : now;
        Vec added{};
        for (j = row.start(); j < row.end(); j += LANES) {
            Vec weights = exponential(load(row.at + j) - origin);
            added += weights;
            store(row.at + j, weights);
        }
        const Real factor = before == now ? 1 : before == -INF ? 0 : std::exp(before - now);
        most = now;
        total = total * factor + sum(added);
        return factor;
    }

    Real log_total() const { return total == 0 ? 0 : std::log(total); }
};

}  // namespace
