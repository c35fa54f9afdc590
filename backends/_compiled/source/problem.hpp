// One call of relative attention, as the kernels get it: arrays by address and strides in entries, of float32 or
// of float64.
// The last axis of every array is contiguous, that of a mask may be one entry for all.
#pragma once

#include <cstdint>

template <class T>
struct Array {
    T *at = nullptr;
    std::int64_t item = 0, head = 0, row = 0;  // steps

    explicit operator bool() const { return at != nullptr; }
    T *of(std::int64_t i, std::int64_t h, std::int64_t r = 0) const { return at + i * item + h * head + r * row; }
};

template <class Real>
struct ProblemOf {
    std::int64_t items, heads, key_heads, queries, keys, width, rel_width, value_width;
    std::int64_t rows, left;         // of the tables: row c is for the relative position c - left
    std::int64_t clip;               // whether the edge rows go on, else nothing is beyond them
    std::int64_t before, after;      // a query sees the relative positions -before … after …
    std::int64_t block, behind;      // … of its own block of so many positions, and of so many behind; block 0: none
    std::int64_t offset;             // the position of query 0
    Real scale, rel_scale, softcap;  // softcap 0: none

    Array<const Real> q, k, v, rel_q, rel_k, rel_v, bias, key_table, added;
    Array<const unsigned char> seen;   // a boolean mask …
    std::int64_t mask_adds, mask_key;  // … or whether it is `added`; its step from key to key, 1 or 0

    // What queries and keys belong to: a query sees the keys of its own segment. Keys have some to spare.
    Array<const std::int32_t> q_segments, k_segments;

    // Where queries and keys stand, if not one after the other; keys have some to spare.
    Array<const std::int32_t> q_positions, k_positions;

    // Dropout: a weight is kept where the hashes of its query and of its key, joined and stirred, reach the threshold.
    Array<const std::int32_t> query_hashes, key_hashes;
    std::int64_t threshold;
    Real kept;  // the share of the weights

    Array<Real> out, lse;

    // What the backward pass is given beside the results, and gives. Gradients of tables are added to, in one of some
    // sums: parts that follow one another have others, so that nobody has to wait.
    std::int64_t sums = 1;
    Array<const Real> d_out, d_lse;
    Array<Real> d_q, d_k, d_v, d_rel_q, d_rel_k, d_rel_v, d_bias, d_key_table;

    std::int64_t group() const { return heads / key_heads; }
};

// Work on one of so many parts of a call; false if there is no memory.
template <class Real>
using Kernel = bool (*)(const ProblemOf<Real> &, std::int64_t part, std::int64_t parts);
