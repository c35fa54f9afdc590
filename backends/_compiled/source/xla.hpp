// The kernels as functions of XLA, to which JAX compiles: arrays arrive by the typed foreign function interface, and
// the threads are those of XLA's pool. Python gives every array four dense axes; see `_jax/foreign.py`.
#pragma once

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <type_traits>

#include "integers.hpp"
#include "xla_team.hpp"

namespace xla {

inline Error *error(const Frame *frame, int code, const char *message) {
    NewError args{sizeof(NewError), nullptr, message, code};
    return frame->offers->make_error(&args);
}

// Of the interface: the oldest version with all that is used here, and the latest that the oldest supported JAX has.
constexpr int MAJOR_VERSION = 0, MINOR_VERSION = 1;

// Report the version of the interface; false if it is not requested.
inline bool give_version(Frame *frame) {
    Extension *extension = frame->extensions;
    if (!extension || extension->type != MetadataWanted::TYPE) return false;
    Metadata *metadata = reinterpret_cast<MetadataWanted *>(extension)->metadata;
    metadata->version = {sizeof(Version), nullptr, MAJOR_VERSION, MINOR_VERSION};
    metadata->traits = 0;
    return true;
}

// Reads the numbers and arrays of a call in the order of their declaration; `wrong` is the first error.
class XlaArguments {
public:
    const char *wrong = nullptr;

    explicit XlaArguments(const Frame *frame) : frame(frame) {
        const Numbers *whole = attribute("whole", INT64);
        const Numbers *real = attribute("real", FLOAT64);
        if (!whole || !real) {
            wrong = "the call has no numbers";
            return;
        }
        wholes = static_cast<const Index *>(whole->data), count = static_cast<Index>(whole->count);
        reals = static_cast<const double *>(real->data), real_count = static_cast<Index>(real->count);
    }

    void operator()(const char *, Index &to) {
        if (count-- > 0)
            to = *wholes++;
        else
            refuse("the call has the wrong number of numbers (stale build?)");
    }

    template <class Real>
    void operator()(const char *, Real &to) {
        if (real_count-- > 0)
            to = static_cast<Real>(*reals++);
        else
            refuse("the call has the wrong number of numbers (stale build?)");
    }

    template <class T>
    bool operator()(const char *name, Array<T> &to, Need need, const Axes &axes) {
        return take(name, to, need, axes, TYPE<std::remove_const_t<T>>);
    }

    bool operator()(const char *name, Integers &to, Need need, const Axes &axes) {
        const bool more = arguments < frame->arguments.count;
        to.wide = more && static_cast<const Buffer *>(frame->arguments.at[arguments])->dtype == INT64;
        return take(name, static_cast<Array<const std::int32_t> &>(to), need, axes, to.wide ? INT64 : INT32);
    }

private:
    const Frame *frame;
    const Index *wholes = nullptr;
    const double *reals = nullptr;
    Index count = 0, real_count = 0, arguments = 0, results = 0;

    // Read the next array if the next number says that there is one; results are the arrays that are not constant.
    template <class T>
    bool take(const char *name, Array<T> &to, Need need, const Axes &axes, DataType dtype) {
        Index there = 0;
        (*this)(name, there);
        if (wrong || (there ? need == Need::NOT : need == Need::MUST))
            return refuse("the call has the wrong arrays (stale build?)");
        if (!there) return true;
        constexpr bool given = std::is_const_v<T>;
        Index &next = given ? arguments : results;
        if (next == (given ? frame->arguments.count : frame->results.count))
            return refuse("the call has the wrong arrays (stale build?)");
        const void *from = given ? frame->arguments.at[next] : frame->results.at[next];
        next++;
        return read(*static_cast<const Buffer *>(from), dtype, to, axes);
    }

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
    bool read(const Buffer &from, DataType dtype, Array<T> &to, const Axes &axes) {
        if (from.axes != 4 || from.dtype != dtype) return refuse("an array has the wrong type");
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

template <class Stored>
bool read(XlaArguments &from, ProblemOf<Stored> &x, Index &threads) {
    x.numbers(from), from("entries", x.entries), from("threads", threads);
    if (!from.wrong && x.is_too_large()) from.wrong = "the call is too large";
    return !from.wrong && x.arrays(from) && x.integers(from);
}

// Clear the gradients, some of which the kernels add to: XLA's memory is not initialised.
template <class Stored>
void clear_gradients(ProblemOf<Stored> &x) {
    x.gradients([](const char *, const auto &gradient, Need, const Axes &) {
        const auto &[items, heads, rows, columns] = gradient.sizes;
        if (gradient) std::memset(gradient.at, 0, items * heads * rows * columns * sizeof(*gradient.at));
        return true;
    });
}

// Compute a call on the threads of XLA's pool, using only as many as pays.
template <class Stored>
Error *work(const Frame *frame, Kernel<Stored> kernel, ProblemOf<Stored> &x, Grain grain, Index threads) {
    x.narrow();
    Tasks tasks(x, static_cast<bool>(x.k_positions), grain);
    const Index workers = threads > 1 ? std::min(threads, threads_of_pool(frame)) : 1;
    const auto team = [frame](Shared::Work work, void *of, Index count) { run_on_pool(frame, work, of, count); };
    const bool done = tasks.make() && run_tasks(kernel, x, tasks, team, workers);
    return done ? nullptr : error(frame, NewError::RESOURCE_EXHAUSTED, "relskew: not enough memory");
}

template <class Stored>
Error *attend(Kernel<Stored> kernel, Frame *frame) {
    XlaArguments from(frame);
    ProblemOf<Stored> x{};
    OwnIntegers own;
    Index threads = 1;
    const char *wrong = read(from, x, threads) && x.results(from) ? prepare(x, own) : from.wrong;
    if (wrong) return error(frame, NewError::INVALID_ARGUMENT, wrong);
    return work(frame, kernel, x, grain_of_attend(x), threads);
}

template <class Stored>
Error *pull_back(Kernel<Stored> kernel, Frame *frame) {
    XlaArguments from(frame);
    ProblemOf<Stored> x{};
    OwnIntegers own;
    Index threads = 1;
    const char *wrong =
        read(from, x, threads) && x.cotangents(from) && x.gradients(from) ? prepare(x, own) : from.wrong;
    if (wrong) return error(frame, NewError::INVALID_ARGUMENT, wrong);
    clear_gradients(x);
    return work(frame, kernel, x, grain_of_pull_back(x), threads);
}

// Whether the queries of a call, its first array, are doubles.
inline bool of_doubles(const Frame *frame) {
    return frame->arguments.count > 0 && static_cast<const Buffer *>(frame->arguments.at[0])->dtype == FLOAT64;
}

}  // namespace xla
