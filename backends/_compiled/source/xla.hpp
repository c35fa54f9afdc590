// The kernels as XLA calls them, which JAX compiles to: arrays by the typed interface of foreign functions, threads of
// XLA's own pool. Python brings every array to four axes, dense; see `_jax/foreign.py`.
#pragma once

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <type_traits>

#include "xla_team.hpp"

namespace xla {

inline Error *error(const Frame *frame, int code, const char *message) {
    NewError args{sizeof(NewError), nullptr, message, code};
    return frame->offers->make_error(&args);
}

// Of the interface: the oldest that has all that is used here, and the latest that the oldest supported JAX knows.
constexpr int MAJOR_VERSION = 0, MINOR_VERSION = 1;

// Say which version of the interface this is; false if nobody asks.
inline bool tell_version(Frame *frame) {
    Extension *extension = frame->extensions;
    if (!extension || extension->type != MetadataWanted::TYPE) return false;
    Metadata *metadata = reinterpret_cast<MetadataWanted *>(extension)->metadata;
    metadata->version = {sizeof(Version), nullptr, MAJOR_VERSION, MINOR_VERSION};
    metadata->traits = 0;
    return true;
}

// Reads the numbers and arrays of a call in the order in which they are declared; what is wrong, if anything is.
class Reader {
public:
    const char *wrong = nullptr;

    explicit Reader(const Frame *frame) : frame(frame) {
        const Numbers *whole = attribute("whole", INT64);
        const Numbers *real = attribute("real", FLOAT64);
        if (!whole || !real) {
            wrong = "a call has no numbers";
            return;
        }
        wholes = static_cast<const Index *>(whole->data), count = static_cast<Index>(whole->count);
        reals = static_cast<const double *>(real->data), real_count = static_cast<Index>(real->count);
    }

    void operator()(const char *, Index &to) {
        if (count-- > 0)
            to = *wholes++;
        else
            refuse("a call has other numbers");
    }

    template <class Real>
    void operator()(const char *, Real &to) {
        if (real_count-- > 0)
            to = static_cast<Real>(*reals++);
        else
            refuse("a call has other numbers");
    }

    // Read the next array if the next number says that there is one: the results are those that are written to.
    template <class T>
    bool operator()(const char *name, Array<T> &to, Need need, const Axes &axes) {
        Index there = 0;
        (*this)(name, there);
        if (wrong || (there ? need == Need::NOT : need == Need::MUST)) return refuse("a call has other arrays");
        if (!there) return true;
        constexpr bool given = std::is_const_v<T>;
        Index &next = given ? arguments : results;
        if (next == (given ? frame->arguments.count : frame->results.count)) return refuse("a call has other arrays");
        const void *from = given ? frame->arguments.at[next] : frame->results.at[next];
        next++;
        return read(*static_cast<const Buffer *>(from), to, axes);
    }

private:
    const Frame *frame;
    const Index *wholes = nullptr;
    const double *reals = nullptr;
    Index count = 0, real_count = 0, arguments = 0, results = 0;

    bool refuse(const char *why) {
        if (!wrong) wrong = why;
        return false;
    }

    const Numbers *attribute(const char *name, DataType dtype) const {
        const Attributes &all = frame->attributes;
        for (Index i = 0; i < all.count; i++) {
            const Text &own = *all.names[i];
            if (own.length != std::strlen(name) || std::memcmp(own.at, name, own.length) != 0) continue;
            const Numbers *array = static_cast<const Numbers *>(all.values[i]);
            return all.types[i] == Numbers::TYPE && array->dtype == dtype ? array : nullptr;
        }
        return nullptr;
    }

    template <class T>
    bool read(const Buffer &from, Array<T> &to, const Axes &axes) {
        if (from.axes != 4 || from.dtype != TYPE<std::remove_const_t<T>>) return refuse("an array has another type");
        View view{from.data, 4, {}, {}};
        for (Index i = 3, step = 1; i >= 0; step *= from.sizes[i--])
            view.sizes[i] = from.sizes[i], view.steps[i] = step;
        const char *fault = place(view, axes, to);
        return !fault || refuse(fault);
    }

    template <class T>
    static constexpr DataType TYPE = std::is_same_v<T, float>          ? FLOAT32
                                     : std::is_same_v<T, double>       ? FLOAT64
                                     : std::is_same_v<T, std::int32_t> ? INT32
                                                                       : BOOL;
};

// Moves the arrays of a call on to those of an entry, whose first item this is.
struct Mover {
    Index entry, item;

    template <class T>
    bool operator()(const char *, Array<T> &to, Need, const Axes &axes) const {
        if (to) to.at += to.item * (axes.item.kind == Axis::OF_ENTRY ? entry : item);
        return true;
    }
};

// A call, cut into entries that have tables of their own, and each of them into parts.
template <class Real>
struct Call {
    using Problem = ProblemOf<Real>;

    Kernel<Real> kernel;
    Problem whole{};
    Index parts = 1;
    Index threads = 1, turns = 1;  // how many threads it pays to wake at most, and how many parts each is to have

    // Gradients of the tables, with a sum for each part but the first, which adds to the results themselves.
    struct Table {
        Array<Real> Problem::*gradient;
        Real *results, *sums;
        Index size;  // of an entry
    } tables[4];
    Index table_count = 0;

    explicit Call(Kernel<Real> kernel) : kernel(kernel) {}

    ~Call() {
        for (Index i = 0; i < table_count; i++) std::free(tables[i].sums);
    }

    bool read(Reader &from) {
        Problem &x = whole;
        x.numbers(from), from("entries", x.entries), from("threads", threads), from("turns", turns);
        if (!from.wrong && x.is_too_large()) from.wrong = "a call is too large";
        return !from.wrong && x.arrays(from) && x.integers(from);
    }

    void take_tables() {
        const Problem &x = whole;
        const auto take = [&](Array<Real> Problem::*gradient, Index rows, Index width) {
            const Array<Real> &own = x.*gradient;
            if (own) tables[table_count++] = {gradient, own.at, nullptr, (own.head ? x.heads : 1) * rows * width};
        };
        take(&Problem::d_rel_k, x.rows, x.rel_width), take(&Problem::d_rel_v, x.rows, x.value_width);
        take(&Problem::d_bias, 1, x.rows), take(&Problem::d_key_table, x.rows, x.width);
    }

    // Work on all parts, of which an entry has so many at most; false if there is no memory.
    bool run(const Frame *frame, Index most) {
        const Index entries = whole.entries, workers = threads > 1 ? std::min(threads, Team::workers(frame)) : 1;
        parts = std::max<Index>(1, std::min(most, (workers * turns + entries - 1) / entries));
        if (workers == 1) parts = 1;
        if (!make_sums()) return false;
        const bool done = Team::run(
            frame, [](void *call, Index task) { return static_cast<Call *>(call)->work(task); }, this, entries * parts,
            workers);
        for (Index i = 0; i < table_count; i++) add_sums(tables[i]);
        return done;
    }

private:
    bool work(Index task) {
        const Index entry = task / parts, part = task % parts;
        Problem x = whole;
        x.items /= whole.entries;
        const Mover move{entry, entry * x.items};
        x.arrays(move), x.integers(move), x.results(move), x.cotangents(move), x.gradients(move);
        for (Index i = 0; i < table_count; i++) {
            const Table &table = tables[i];
            (x.*table.gradient).at =
                part ? table.sums + (entry * (parts - 1) + part - 1) * table.size : table.results + entry * table.size;
        }
        x.narrow();
        return kernel(x, part, parts);
    }

    bool make_sums() {
        for (Index i = 0; i < table_count; i++) {
            Table &table = tables[i];
            std::memset(table.results, 0, whole.entries * table.size * sizeof(Real));
            if (parts == 1) continue;
            table.sums = static_cast<Real *>(std::calloc(whole.entries * (parts - 1) * table.size, sizeof(Real)));
            if (!table.sums) return false;
        }
        return true;
    }

    void add_sums(const Table &table) const {
        for (Index entry = 0; entry < whole.entries; entry++)
            for (Index part = 1; part < parts; part++) {
                Real *to = table.results + entry * table.size;
                const Real *from = table.sums + (entry * (parts - 1) + part - 1) * table.size;
                for (Index i = 0; i < table.size; i++) to[i] += from[i];
            }
    }
};

inline Error *finished(const Frame *frame, bool done) {
    return done ? nullptr : error(frame, NewError::RESOURCE_EXHAUSTED, "relskew: there is no memory");
}

template <class Real>
Error *attend(Kernel<Real> kernel, Frame *frame) {
    Call<Real> call(kernel);
    Reader from(frame);
    ProblemOf<Real> &x = call.whole;
    const char *wrong = call.read(from) && x.results(from) ? x.wrong() : from.wrong;
    if (wrong) return error(frame, NewError::INVALID_ARGUMENT, wrong);
    return finished(frame, call.run(frame, x.items / x.entries * x.heads * ((x.queries + BLOCK - 1) / BLOCK)));
}

template <class Real>
Error *pull_back(Kernel<Real> kernel, Frame *frame) {
    Call<Real> call(kernel);
    Reader from(frame);
    ProblemOf<Real> &x = call.whole;
    const char *wrong = call.read(from) && x.cotangents(from) && x.gradients(from) ? x.wrong() : from.wrong;
    if (wrong) return error(frame, NewError::INVALID_ARGUMENT, wrong);
    call.take_tables();
    return finished(frame, call.run(frame, x.items / x.entries * x.key_heads));
}

// Whether a call's queries, its first array, are doubles.
inline bool of_doubles(const Frame *frame) {
    return frame->arguments.count > 0 && static_cast<const Buffer *>(frame->arguments.at[0])->dtype == FLOAT64;
}

}  // namespace xla
