// The integers of queries and keys: from segments and positions of any size, as they are given, those that kernels
// read.
#pragma once

#include "tasks.hpp"

// The integers of a pair of queries and keys in 32 bits, with the same order and, of positions that a table reaches,
// the same differences. Those of the keys are padded.
struct Narrowed {
    Memory<std::int32_t> queries, keys;
    Memory<Limits> limits;
    Array<const std::int32_t> of_queries, of_keys;
    Array<const Limits> of_limits;
    Index low = 0, high = 0;  // the lowest and the highest difference of a key's and a query's position

    // Narrow integers; return what is wrong, or null.
    const char *make(const Sizes &x, const Integers &of_queries, const Integers &of_keys, bool are_positions);
};

// The memory of a call's integers.
struct OwnIntegers {
    Narrowed segments, positions;
    Memory<std::int32_t> key_hashes;
};

// Derive from a call that was read what the kernels need; return what is wrong, or null.
template <class Stored>
const char *prepare(ProblemOf<Stored> &x, OwnIntegers &own) {
    x.bound();
    if (const char *wrong = x.wrong()) return wrong;
    if (const char *wrong = own.segments.make(x, x.segments[0], x.segments[1], false)) return wrong;
    if (const char *wrong = own.positions.make(x, x.positions[0], x.positions[1], true)) return wrong;
    x.q_segments = own.segments.of_queries, x.k_segments = own.segments.of_keys;
    x.q_positions = own.positions.of_queries, x.k_positions = own.positions.of_keys;
    x.q_limits = own.positions.of_limits;
    if (!x.given_key_hashes) return nullptr;
    const Index entries = x.given_key_hashes.sizes[0], row = x.keys + SPARE;
    own.key_hashes = memory<std::int32_t>(entries * row);
    if (!own.key_hashes) return NO_MEMORY;
    for (Index entry = 0; entry < entries; entry++)
        std::copy_n(x.given_key_hashes.of(entry, 0), x.keys, own.key_hashes.get() + entry * row);
    x.key_hashes.at = own.key_hashes.get(), x.key_hashes.item = entries > 1 ? row : 0;
    return nullptr;
}
