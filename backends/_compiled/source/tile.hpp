// Products of small matrices whose sums stay in registers: the core of all longer calls.
#pragma once

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "amx.hpp"
#include "tasks.hpp"

namespace {

using Problem = ProblemOf<Stored>;

constexpr int PANEL = 2 * LANES;  // columns of a product that are computed at once,
#if defined(HIGH_ROWS) && !defined(__AVX2__)
constexpr int HIGH = HIGH_ROWS;  // set to test the size of another processor: ARM has 12
#elif defined(__AVX512F__) || defined(__aarch64__)
constexpr int HIGH = 12;  // and rows, as many as there are registers for
#else
constexpr int HIGH = 6;
#endif

// Rows of a block that all steps of a pass take together. Tiles multiply faster than the other factor is read, so that
// more rows have to share it; for vectors, it is better that the rows of logits stay in the fastest cache.
constexpr Index STRIP = TILES ? BLOCK : HIGH;
static_assert(STRIP % HIGH == 0);

// A matrix whose entry (row, column) is at[row * row_step + column * step], where one of the steps is 1. It may be
// transposed, or skewed: then the step between rows is one entry shorter or longer.
//
// Factors are passed by reference: a copy that is read in larger pieces than it was written delays every product.
struct Matrix {
    const Real *at;
    Index row, step;

    Matrix below(Index rows) const { return {at + rows * row, row, step}; }
};

// Steps of a product in one turn of its loop: where sums fill 32 registers, addresses for more would not stay in any.
#if defined(__AVX2__) && !defined(__AVX512F__)
constexpr int STEPS = 4;
#else
constexpr int STEPS = 1;
#endif

// c = start + a · b for N rows and V vectors of columns; `start` may be null, or c.
template <int N, int V, bool TRANSPOSED>
void product(Index depth, const Matrix &a, const Real *b, Index b_row, const Real *start, Index start_row, Real *c,
             Index c_row) {
    Vec total[N][V];
#pragma GCC unroll 12
    for (int n = 0; n < N; n++)
#pragma GCC unroll 2
        for (int i = 0; i < V; i++) total[n][i] = start ? load(start + n * start_row + i * LANES) : Vec{};
#pragma GCC unroll STEPS
    for (Index k = 0; k < depth; k++) {
        Vec row[V];
        for (int i = 0; i < V; i++) row[i] = load(b + k * b_row + i * LANES);
        const Real *x = TRANSPOSED ? a.at + k * a.step : a.at + k;
#pragma GCC unroll 12
        for (int n = 0; n < N; n++)
            for (int i = 0; i < V; i++) total[n][i] += splat(x[TRANSPOSED ? n : n * a.row]) * row[i];
    }
#pragma GCC unroll 12
    for (int n = 0; n < N; n++)
#pragma GCC unroll 2
        for (int i = 0; i < V; i++) store(c + n * c_row + i * LANES, total[n][i]);
}

// A matrix whose entries are pairs of numbers, like those of the other factor: (row, column) is at[row * row_step +
// column * step].
struct Paired {
    const BFloat16 *at;
    Index row, step = 2;

    Paired below(Index rows) const { return {at + rows * row, row, step}; }
};

// Where no instruction repeats a number in all lanes, that is done once for all panels of a product.
#if defined(__SSE2__) && !defined(__AVX2__) && !defined(EMULATED)
constexpr bool REPEATED = true;
// Each product overwrites a copy. Compilers load all of them again, which takes longer than the products; of every
// third row they may not, and copy a register instead.
inline void copy_register(Index row, Vec &x) {
    if (row % 3 == 0) asm("" : "+x"(x));
}
#else
constexpr bool REPEATED = false;
inline void copy_register(Index, Vec &) {}
#endif

// Some columns of up to HIGH rows of a matrix, each number as often as there are lanes.
struct Repeated {
    static constexpr Index DEPTH = 64;  // columns: they stay in the fastest cache
    Vec at[HIGH * DEPTH];

    template <int N>
    void take(const Matrix &from, Index depth) {
        if (from.step == 1)
            for (Index n = 0; n < N; n++) repeat<1>(from.at + n * from.row, depth, at + n * DEPTH);
        else
            for (Index k = 0; k < depth; k++) repeat<DEPTH>(from.at + k * from.step, N, at + k);
    }

    // Repeat each of some adjacent numbers; the next vector is STEP further on.
    template <Index STEP>
    static void repeat(const Real *x, Index count, Vec *to) {
        Index i = 0;
        for (; i + LANES <= count; i += LANES)
            repeat_lanes<STEP>(load(x + i), to + i * STEP, std::make_integer_sequence<int, LANES>());
        for (; i < count; i++) to[i * STEP] = splat(x[i]);
    }

    template <Index STEP, int... LANE>
    static void repeat_lanes(Vec x, Vec *to, std::integer_sequence<int, LANE...>) {
        (..., (to[LANE * STEP] = picked(x, x, [](int) { return LANE; })));
    }
};

// The number of a factor in row n and column k, in the form in which it is multiplied.
inline const BFloat16 *number(const Paired &a, Index n, Index k) { return a.at + n * a.row + k * a.step; }
inline Vec number(const Repeated &a, Index n, Index k) {
    Vec x = a.at[n * Repeated::DEPTH + k];
    copy_register(n, x);
    return x;
}

inline Vec add_product_of(const BFloat16 *a, Vec b, Vec c) { return add_pairs(a, b, c); }
inline Vec add_product_of(Vec a, Vec b, Vec c) { return c + a * b; }

// The same for a factor in another form: `depth` pairs, or repeated numbers.
template <int N, int V, class A>
void product_of(Index depth, const A &a, const Real *b, Index b_row, const Real *start, Index start_row, Real *c,
                Index c_row) {
    Vec total[N][V];
#pragma GCC unroll 12
    for (int n = 0; n < N; n++)
#pragma GCC unroll 2
        for (int i = 0; i < V; i++) total[n][i] = start ? load(start + n * start_row + i * LANES) : Vec{};
#pragma GCC unroll STEPS
    for (Index k = 0; k < depth; k++) {
        Vec row[V];
        for (int i = 0; i < V; i++) row[i] = load(b + k * b_row + i * LANES);
#pragma GCC unroll 12
        for (int n = 0; n < N; n++) {
            const auto x = number(a, n, k);
            for (int i = 0; i < V; i++) total[n][i] = add_product_of(x, row[i], total[n][i]);
        }
    }
#pragma GCC unroll 12
    for (int n = 0; n < N; n++)
#pragma GCC unroll 2
        for (int i = 0; i < V; i++) store(c + n * c_row + i * LANES, total[n][i]);
}

#if defined(AMX)
// c = a · b for HIGH rows, V vectors of columns and whole tiles of pairs, or c += a · b. Two vectors of columns are
// adjacent in b, and the next two are `b_panel` further on.
template <int... I>
void product_by_tiles(Index depth, const Paired &a, const Real *b, Index b_row, Index b_panel, bool adds, Real *c,
                      Index c_row, std::integer_sequence<int, I...>) {
    static_assert(HIGH == TILE_ROWS && LANES == TILE_PAIRS);
    constexpr Index REAL = sizeof(Real);
    if (adds)
        (..., load_tile<I>(c + I * LANES, c_row * REAL));
    else
        (..., clear_tile<I>());
    for (Index k = 0; k + TILE_PAIRS <= depth; k += TILE_PAIRS, b += TILE_PAIRS * b_row) {
        load_tile<LEFT>(a.at + 2 * k, a.row * static_cast<Index>(sizeof(BFloat16)));
        const auto with = [&](auto tile) {
            constexpr int TILE = decltype(tile)::value, RIGHT = LEFT + 1 + TILE % 3;
            load_tile<RIGHT>(b + TILE / 2 * b_panel + TILE % 2 * LANES, b_row * REAL);
            multiply_tiles<TILE, RIGHT>();
        };
        (..., with(std::integral_constant<int, I>()));
    }
    (..., store_tile<I>(c + I * LANES, c_row * REAL));
}

// Add a matrix that may be skewed: its rows cross cache lines, which tiles are slow to load.
inline void add_start(Index rows, Index columns, const Real *start, Index start_row, Real *c, Index c_row) {
    for (Index n = 0; n < rows; n++)
        for (Index i = 0; i < columns; i += LANES)
            store(c + n * c_row + i, load(c + n * c_row + i) + load(start + n * start_row + i));
}

// c = start + a · b for any number of rows, rounded up to HIGH, and V vectors of columns; pairs that do not fill a tile
// are multiplied by vectors.
template <int V>
void multiply_by_tiles(Index rows, Index depth, const Paired &whole, const Real *b, Index b_row, const Real *start,
                       Index start_row, Real *c, Index c_row) {
    const bool adds = start == c && start_row == c_row;
    const Index k = floored(depth, TILE_PAIRS);
    for (Index n = 0; n < rows; n += HIGH, c += HIGH * c_row) {
        const Paired a = whole.below(n);
        product_by_tiles(k, a, b, b_row, PANEL, adds, c, c_row, std::make_integer_sequence<int, V>());
        if (start && !adds) add_start(HIGH, V * LANES, start + n * start_row, start_row, c, c_row);
        if (k < depth)
            product_of<HIGH, V>(depth - k, Paired{a.at + 2 * k, a.row}, b + k * b_row, b_row, c, c_row, c, c_row);
    }
}

// c += a · b for whole tiles of pairs, and all columns of rows that are padded to whole vectors.
inline void add_product_of_tiles(Index rows, Index depth, const Paired &whole, const Real *b, Index b_row,
                                 Index columns, Real *c, Index c_row) {
    for (Index n = 0; n < rows; n += HIGH, c += HIGH * c_row) {
        const Paired a = whole.below(n);
        const auto add = [&](Index i, auto tiles) {
            product_by_tiles(depth, a, b + i, b_row, PANEL, true, c + i, c_row, tiles);
        };
        Index i = 0;
        for (; i + 2 * PANEL <= columns; i += 2 * PANEL) add(i, std::make_integer_sequence<int, 4>());
        for (; i + PANEL <= columns; i += PANEL) add(i, std::make_integer_sequence<int, 2>());
        for (; i < columns; i += LANES) add(i, std::make_integer_sequence<int, 1>());
    }
}
#endif

// Call `with` for a number of rows that products are compiled for, and return it: at least `rows`, or HIGH.
template <class With>
Index rounded_up(Index rows, const With &with) {
    constexpr int MIDDLE = std::min(8, HIGH);
    if (rows <= 4) return with(std::integral_constant<int, 4>()), 4;
    if (rows <= 8) return with(std::integral_constant<int, MIDDLE>()), MIDDLE;
    return with(std::integral_constant<int, HIGH>()), HIGH;
}

// The same for any number of rows, rounded up: a and c have extra rows.
template <int V, class A>
void multiply(Index rows, Index depth, const A &whole, const Real *b, Index b_row, const Real *start, Index start_row,
              Real *c, Index c_row) {
#if defined(AMX)
    if constexpr (std::is_same_v<A, Paired>)
        if (depth >= TILE_PAIRS) return multiply_by_tiles<V>(rows, depth, whole, b, b_row, start, start_row, c, c_row);
#endif
    for (Index done = 0; done < rows;) {
        const A a = whole.below(done);
        const Index n = rounded_up(rows - done, [&](auto tall) {
            constexpr int N = decltype(tall)::value;
            if constexpr (std::is_same_v<A, Paired>)
                product_of<N, V>(depth, a, b, b_row, start, start_row, c, c_row);
            else if (a.step != 1)
                product<N, V, true>(depth, a, b, b_row, start, start_row, c, c_row);
            else
                product<N, V, false>(depth, a, b, b_row, start, start_row, c, c_row);
        });
        done += n;
        if (start) start += n * start_row;
        c += n * c_row;
    }
}

// The same for up to HIGH rows.
template <int V>
void multiply(Index rows, Index depth, const Repeated &a, const Real *b, Index b_row, const Real *start,
              Index start_row, Real *c, Index c_row) {
    rounded_up(
        rows, [&](auto tall) { product_of<decltype(tall)::value, V>(depth, a, b, b_row, start, start_row, c, c_row); });
}

// Call `part` for the whole left factor of a product, or for its parts with repeated numbers: with the factor, its
// first row and the number of rows, and its first column and the number of columns.
template <class A, class Part>
void in_parts(Index rows, Index depth, const A &a, const Part &part) {
    if constexpr (REPEATED && std::is_same_v<A, Matrix>) {
        Repeated repeated;
        for (Index n = 0; n < rows; n += HIGH)
            for (Index k = 0; k == 0 || k < depth; k += Repeated::DEPTH) {
                const Index height = std::min<Index>(HIGH, rows - n), columns = std::min(Repeated::DEPTH, depth - k);
                const Matrix own{a.at + n * a.row + k * a.step, a.row, a.step};
                rounded_up(height, [&](auto tall) { repeated.take<decltype(tall)::value>(own, columns); });
                part(repeated, n, height, k, columns);
            }
    } else {
        part(a, 0, rows, 0, depth);
    }
}

// The same for a panel of which only the first `columns` are needed.
template <class A>
void multiply_panel(Index columns, Index rows, Index depth, const A &a, const Real *b, const Real *start,
                    Index start_row, Real *c, Index c_row) {
    if (columns > LANES)
        multiply<2>(rows, depth, a, b, PANEL, start, start_row, c, c_row);
    else
        multiply<1>(rows, depth, a, b, PANEL, start, start_row, c, c_row);
}

// The same for adjacent panels and a strip of rows; `start_of` is called once for each panel, and returns where its
// start is, and the step between its rows.
template <class A, class StartOf>
void multiply_panels(Index columns, Index rows, Index depth, const A &a, const Real *b, const StartOf &start_of,
                     Real *c, Index c_row) {
    Index j = 0;
#if defined(AMX)
    if constexpr (std::is_same_v<A, Paired>)
        if (depth % TILE_PAIRS == 0) {  // two at a time, as many sums as there are tiles for
            for (; j + PANEL < columns; j += 2 * PANEL)
                for (Index n = 0; n < rows; n += HIGH)
                    product_by_tiles(depth, a.below(n), b + j * depth, PANEL, depth * PANEL, false, c + n * c_row + j,
                                     c_row, std::make_integer_sequence<int, 4>());
            for (Index i = 0; i < j; i += PANEL)
                if (const auto start = start_of(i); start.at) add_start(rows, PANEL, start.at, start.row, c + i, c_row);
        }
#endif
    in_parts(rows, depth, a, [&](const auto &own, Index n, Index height, Index k, Index part) {
        for (Index i = j; i < columns; i += PANEL) {
            const Real *with = b + i * depth + k * PANEL;
            Real *to = c + n * c_row + i;
            if (k == 0) {
                const auto start = start_of(i);
                multiply_panel(columns - i, height, part, own, with, start.at, start.row, to, c_row);
            } else {
                multiply_panel(columns - i, height, part, own, with, to, c_row, to, c_row);
            }
        }
    });
}

// c += a · b for all columns of rows that are padded to whole vectors.
template <class A>
void add_product(Index rows, Index depth, const A &a, const Real *b, Index b_row, Index columns, Real *c, Index c_row) {
#if defined(AMX)
    if constexpr (std::is_same_v<A, Paired>)
        if (const Index k = floored(depth, TILE_PAIRS)) {
            add_product_of_tiles(rows, k, a, b, b_row, columns, c, c_row);
            if (k < depth)
                add_product(rows, depth - k, Paired{a.at + 2 * k, a.row}, b + k * b_row, b_row, columns, c, c_row);
            return;
        }
#endif
    in_parts(rows, depth, a, [&](const auto &own, Index n, Index height, Index k, Index part) {
        const Real *from = b + k * b_row;
        Real *to = c + n * c_row;
        Index i = 0;
        for (; i + PANEL <= columns; i += PANEL)
            multiply<2>(height, part, own, from + i, b_row, to + i, c_row, to + i, c_row);
        for (; i < columns; i += LANES) multiply<1>(height, part, own, from + i, b_row, to + i, c_row, to + i, c_row);
    });
}

struct Columns {
    Index from, end;
};

// The same for a band: `columns_of` returns the columns that are not zeros, for some rows from one on, in their order.
template <class A, class ColumnsOf>
void add_band(Index rows, const ColumnsOf &columns_of, const A &a, const Real *b, Index b_row, Index columns, Real *c,
              Index c_row) {
    for (Index n = 0; n < rows; n += HIGH) {
        const Index height = std::min<Index>(HIGH, rows - n);
        const auto [k, end] = columns_of(n, height);
        if (k < end)
            add_product(height, end - k, A{a.at + n * a.row + k * a.step, a.row, a.step}, b + k * b_row, b_row, columns,
                        c + n * c_row, c_row);
    }
}

inline Index padded(Index n, Index to = LANES) { return (n + to - 1) / to * to; }

// Pack rows into panels of PANEL rows, stored column by column; missing rows are zeros.
inline void pack(const Stored *x, Index row, Index rows, Index width, Real *panels) {
    const Index whole = width / LANES * LANES;
    for (Index first = 0; first < rows; first += PANEL, panels += PANEL * width)
        for (int half = 0; half < PANEL; half += LANES) {
            const Index have = std::clamp<Index>(rows - first - half, 0, LANES);
            const Stored *from = have ? x + (first + half) * row : x;
            for (Index d = 0; d < whole; d += LANES) {
                Vec block[LANES];
                for (Index j = 0; j < LANES; j++) block[j] = j < have ? load(from + j * row + d) : Vec{};
                transpose(block);
                for (int i = 0; i < LANES; i++) store(panels + (d + i) * PANEL + half, block[i]);
            }
            for (Index d = whole; d < width; d++)
                for (Index j = 0; j < LANES; j++) panels[d * PANEL + half + j] = j < have ? Real(from[j * row + d]) : 0;
        }
}

// Pack rows of bfloat16 as `pack` does, in pairs of columns; an odd last column is paired with zero.
template <class T>
void pack_pairs(const T *x, Index row, Index rows, Index width, Real *panels) {
    const Index pairs = (width + 1) / 2, whole = width / (2 * LANES) * LANES;
    for (Index first = 0; first < rows; first += PANEL, panels += PANEL * pairs)
        for (int half = 0; half < PANEL; half += LANES) {
            const Index have = std::clamp<Index>(rows - first - half, 0, LANES);
            const T *from = have ? x + (first + half) * row : x;
            for (Index d = 0; d < whole; d += LANES) {
                Vec block[LANES] = {};
                for (Index j = 0; j < have; j++) std::memcpy(block + j, from + j * row + 2 * d, sizeof(Vec));
                transpose(block);
                for (int i = 0; i < LANES; i++) store(panels + (d + i) * PANEL + half, block[i]);
            }
            for (Index d = whole; d < pairs; d++)
                for (Index j = 0; j < LANES; j++) {
                    T pair[2] = {};
                    for (Index i = 2 * d; i < std::min(2 * d + 2, width) && j < have; i++)
                        pair[i - 2 * d] = from[j * row + i];
                    std::memcpy(panels + d * PANEL + half + j, pair, sizeof(pair));
                }
        }
}

// Pack rows, by pairs if `in_pairs`.
template <class T>
void pack_as(bool in_pairs, const T *x, Index row, Index rows, Index width, Real *panels) {
    if constexpr (PAIRS)
        if (in_pairs) return pack_pairs(x, row, rows, width, panels);
    pack(x, row, rows, width, panels);
}

template <class A, class B>
inline Real dot(const A *a, const B *b, Index width) {
    const Index whole = width / LANES * LANES;  // the compiler sees that no number is left of a constant width
    Vec total{};
    for (Index d = 0; d < whole; d += LANES) total += load(a + d) * load(b + d);
    Real rest = 0;
    for (Index d = whole; d < width; d++) rest += Real(a[d]) * Real(b[d]);
    return sum(total) + rest;
}

}  // namespace
