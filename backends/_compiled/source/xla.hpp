// The kernels as XLA calls them, which JAX compiles to: arrays by the typed interface of foreign functions, threads of
// XLA's own pool. Python brings every array to four axes, dense; see `_jax/foreign.py`.
#pragma once

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "problem.hpp"
#include "xla_team.hpp"

namespace xla {

inline Error *error(const Frame *frame, XLA_FFI_Error_Code code, const char *message) {
    XLA_FFI_Error_Create_Args args{XLA_FFI_Error_Create_Args_STRUCT_SIZE, nullptr, message, code};
    return frame->api->XLA_FFI_Error_Create(&args);
}

// Of the interface: the oldest that has all that is used here, and the latest that the oldest supported JAX knows.
constexpr int MINOR_VERSION = 1;

// Say which version of the interface this is; false if nobody asks.
inline bool tell_version(Frame *frame) {
    XLA_FFI_Extension_Base *extension = frame->extension_start;
    if (!extension || extension->type != XLA_FFI_Extension_Metadata) return false;
    XLA_FFI_Metadata *metadata = reinterpret_cast<XLA_FFI_Metadata_Extension *>(extension)->metadata;
    metadata->api_version = {XLA_FFI_Api_Version_STRUCT_SIZE, nullptr, XLA_FFI_API_MAJOR, MINOR_VERSION};
    metadata->traits = 0;
    return true;
}

constexpr XLA_FFI_DataType dtype(float) { return XLA_FFI_DataType_F32; }
constexpr XLA_FFI_DataType dtype(double) { return XLA_FFI_DataType_F64; }
constexpr XLA_FFI_DataType dtype(std::int32_t) { return XLA_FFI_DataType_S32; }
constexpr XLA_FFI_DataType dtype(unsigned char) { return XLA_FFI_DataType_PRED; }

// The arrays and numbers of a call, one after the other.
class Reader {
public:
    bool good = true;

    explicit Reader(const Frame *frame) : frame(frame) {
        const XLA_FFI_Array *whole = attribute("whole", XLA_FFI_DataType_S64);
        const XLA_FFI_Array *real = attribute("real", XLA_FFI_DataType_F64);
        good = whole && real;
        if (!good) return;
        wholes = static_cast<const Index *>(whole->data), count = static_cast<Index>(whole->size);
        reals = static_cast<const double *>(real->data), real_count = static_cast<Index>(real->size);
    }

    Index whole() { return count-- > 0 ? *wholes++ : refuse(); }
    double real() { return real_count-- > 0 ? *reals++ : static_cast<double>(refuse()); }

    // Read the next array if the next number says that there is one.
    template <class T>
    void argument(Array<const T> &to, Index *column = nullptr) {
        if (!whole()) return;
        if (arguments == frame->args.size) return static_cast<void>(refuse());
        read(static_cast<const XLA_FFI_Buffer *>(frame->args.args[arguments++]), to, column);
    }

    template <class T>
    const XLA_FFI_Buffer *result(Array<T> &to) {
        if (!whole()) return nullptr;
        if (results == frame->rets.size) return refuse(), nullptr;
        const XLA_FFI_Buffer *from = static_cast<const XLA_FFI_Buffer *>(frame->rets.rets[results++]);
        read(from, to, nullptr);
        return from;
    }

private:
    const Frame *frame;
    const Index *wholes = nullptr;
    const double *reals = nullptr;
    Index count = 0, real_count = 0, arguments = 0, results = 0;

    Index refuse() {
        good = false;
        return 0;
    }

    const XLA_FFI_Array *attribute(const char *name, XLA_FFI_DataType dtype) const {
        const XLA_FFI_Attrs &all = frame->attrs;
        for (Index i = 0; i < all.size; i++) {
            const XLA_FFI_ByteSpan &own = *all.names[i];
            if (own.len != std::strlen(name) || std::memcmp(own.ptr, name, own.len)) continue;
            const XLA_FFI_Array *array = static_cast<const XLA_FFI_Array *>(all.attrs[i]);
            return all.types[i] == XLA_FFI_AttrType_ARRAY && array->dtype == dtype ? array : nullptr;
        }
        return nullptr;
    }

    template <class T>
    void read(const XLA_FFI_Buffer *from, Array<T> &to, Index *column) {
        if (from->rank != 4 || from->dtype != dtype(std::remove_const_t<T>())) return static_cast<void>(refuse());
        Index steps[4], step = 1;
        for (int i = 3; i >= 0; step *= from->dims[i--]) steps[i] = from->dims[i] == 1 ? 0 : step;
        to.at = static_cast<T *>(from->data), to.item = steps[0], to.head = steps[1], to.row = steps[2];
        if (column) *column = steps[3];
    }
};

// A call, cut into entries that have tables of their own, and each of them into parts.
template <class Real>
struct Call {
    using Problem = ProblemOf<Real>;
    static constexpr Array<const std::int32_t> Problem::*LABELS[] = {&Problem::q_segments, &Problem::k_segments,
                                                                     &Problem::q_positions, &Problem::k_positions};

    Kernel<Real> kernel;
    Problem whole{};
    Index entries = 1, parts = 1;
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

    void read_operands(Reader &from) {
        Problem &x = whole;
        for (Index *number :
             {&x.keys,      &x.offset,      &x.items,     &x.heads,     &x.key_heads, &x.queries, &x.width,
              &x.rel_width, &x.value_width, &x.rows,      &x.left,      &x.clip,      &x.before,  &x.after,
              &x.block,     &x.behind,      &x.mask_adds, &x.threshold, &entries,     &threads,   &turns})
            *number = from.whole();
        for (Real *number : {&x.scale, &x.rel_scale, &x.softcap, &x.kept}) *number = static_cast<Real>(from.real());
        from.argument(x.q), from.argument(x.k), from.argument(x.v), from.argument(x.rel_k), from.argument(x.rel_v);
        from.argument(x.bias), from.argument(x.rel_q);
        x.mask_adds ? from.argument(x.added, &x.mask_key) : from.argument(x.seen, &x.mask_key);
        from.argument(x.key_table);
        for (Array<const std::int32_t> Problem::*labels : LABELS) from.argument(x.*labels);
        from.argument(x.query_hashes), from.argument(x.key_hashes);
    }

    void read_table(Reader &from, Array<Real> Problem::*gradient) {
        const XLA_FFI_Buffer *buffer = from.result(whole.*gradient);
        if (!buffer || !from.good) return;
        const Index size = buffer->dims[1] * buffer->dims[2] * buffer->dims[3];
        tables[table_count++] = {gradient, (whole.*gradient).at, nullptr, size};
    }

    bool run(const Frame *frame, Index most) {
        const Index workers = threads > 1 ? std::min(threads, Team::workers(frame)) : 1;
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
    template <class T>
    static void move(Array<T> &x, Index steps) {
        if (x) x.at += steps * x.item;
    }

    bool work(Index task) {
        const Index entry = task / parts, part = task % parts;
        Problem x = whole;
        x.items = whole.items / entries;
        for (Array<const Real> Problem::*table :
             {&Problem::rel_k, &Problem::rel_v, &Problem::bias, &Problem::key_table})
            move(x.*table, entry);
        move(x.key_hashes, entry);
        const Index first = entry * x.items;
        for (Array<const Real> Problem::*each : {&Problem::q, &Problem::k, &Problem::v, &Problem::rel_q,
                                                 &Problem::added, &Problem::d_out, &Problem::d_lse})
            move(x.*each, first);
        for (Array<Real> Problem::*each :
             {&Problem::out, &Problem::lse, &Problem::d_q, &Problem::d_k, &Problem::d_v, &Problem::d_rel_q})
            move(x.*each, first);
        for (Array<const std::int32_t> Problem::*labels : LABELS) move(x.*labels, first);
        move(x.seen, first), move(x.query_hashes, first);
        for (Index i = 0; i < table_count; i++) {
            const Table &table = tables[i];
            (x.*table.gradient).at =
                part ? table.sums + (entry * (parts - 1) + part - 1) * table.size : table.results + entry * table.size;
        }
        return kernel(x, part, parts);
    }

    bool make_sums() {
        for (Index i = 0; i < table_count; i++) {
            Table &table = tables[i];
            std::memset(table.results, 0, entries * table.size * sizeof(Real));
            if (parts == 1) continue;
            table.sums = static_cast<Real *>(std::calloc(entries * (parts - 1) * table.size, sizeof(Real)));
            if (!table.sums) return false;
        }
        return true;
    }

    void add_sums(const Table &table) const {
        for (Index entry = 0; entry < entries; entry++)
            for (Index part = 1; part < parts; part++) {
                Real *to = table.results + entry * table.size;
                const Real *from = table.sums + (entry * (parts - 1) + part - 1) * table.size;
                for (Index i = 0; i < table.size; i++) to[i] += from[i];
            }
    }
};

inline Error *unreadable(const Frame *frame) {
    return error(frame, XLA_FFI_Error_Code_INVALID_ARGUMENT, "relskew: a call has other arrays or numbers");
}

inline Error *finished(const Frame *frame, bool done) {
    return done ? nullptr : error(frame, XLA_FFI_Error_Code_RESOURCE_EXHAUSTED, "relskew: there is no memory");
}

template <class Real>
Error *attend(Kernel<Real> kernel, Frame *frame) {
    Call<Real> call(kernel);
    Reader from(frame);
    ProblemOf<Real> &x = call.whole;
    call.read_operands(from);
    from.result(x.out), from.result(x.lse);
    if (!from.good) return unreadable(frame);
    const Index block = 48, blocks = (x.queries + block - 1) / block;
    return finished(frame, call.run(frame, x.items / call.entries * x.heads * blocks));
}

template <class Real>
Error *pull_back(Kernel<Real> kernel, Frame *frame) {
    using Problem = ProblemOf<Real>;
    Call<Real> call(kernel);
    Reader from(frame);
    Problem &x = call.whole;
    call.read_operands(from);
    Array<const Real> out, lse;
    from.argument(x.d_out), from.argument(out), from.argument(lse), from.argument(x.d_lse);
    from.result(x.d_q), from.result(x.d_k), from.result(x.d_v);
    for (Array<Real> Problem::*table : {&Problem::d_rel_k, &Problem::d_rel_v, &Problem::d_bias})
        call.read_table(from, table);
    from.result(x.d_rel_q);
    call.read_table(from, &Problem::d_key_table);
    if (!from.good) return unreadable(frame);
    const auto given = [](const Array<const Real> &x) {
        return Array<Real>{const_cast<Real *>(x.at), x.item, x.head, x.row};
    };
    x.out = given(out), x.lse = given(lse);
    return finished(frame, call.run(frame, x.items / call.entries * x.key_heads));
}

// Whether a call's queries, its first array, are doubles.
inline bool of_doubles(const Frame *frame) {
    return frame->args.size > 0 &&
           static_cast<const XLA_FFI_Buffer *>(frame->args.args[0])->dtype == XLA_FFI_DataType_F64;
}

}  // namespace xla
