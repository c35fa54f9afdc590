// `relskew::RelativeAttention` for onnxruntime; a session loads it with `register_custom_ops_library`.
#include <pthread.h>
#include <unistd.h>

#include <cstring>

#include "onnx_node.hpp"

namespace {

Index count_processors() {
#if defined(_WIN32)
    return pthread_num_processors_np();
#else
    return sysconf(_SC_NPROCESSORS_ONLN);
#endif
}

const Index processors = count_processors();  // once: the C library reads a file, which takes as long as a token

// One run of a node.
class Run {
    const Node &node_;
    const Functions &ort_;
    Context *const context_;
    relskew_call call_;
    relskew_array inputs_[INPUT_COUNT] = {};
    const Index *offsets_ = nullptr;  // one for each item, or one for all
    bool differ_ = false, side_by_side_ = false;

public:
    Calls calls;

    Run(const Node &node, Context *context)
        : node_(node), ort_(node.ort), context_(context), call_(node.call), calls{node.ort} {}

    void operator()() {
        relskew_array present[2] = {};
        if (read() && append(present)) attend(present[0].data != nullptr);
    }

private:
    bool read() {
        for (std::size_t i = 0; i < INPUT_COUNT; i++) {
            if (!read(i, inputs_[i])) return false;
            if (INPUTS[i].at && inputs_[i].data) call_.*INPUTS[i].at = inputs_[i];
        }
        if (inputs_[MASK].data && inputs_[ADDED].data)
            return calls.refuse("relskew: pass either `mask` or `added`, not both");
        call_.mask_adds = inputs_[ADDED].data != nullptr;
        cut_tables();
        if (call_.sinks.data && call_.sinks.axes == 3) call_.sinks.axes = 1;  // (heads, 1, 1)
        for (const relskew_array *x : {&call_.q, &call_.k, &call_.v})
            if (x->axes != 4)
                return calls.refuse(
                    "relskew: `q`, `k` and `v` must be (batch, heads, length, width) or (batch, length, "
                    "heads * width)");
        const relskew_array &offset = inputs_[OFFSET];
        if (!offset.data) return true;
        const Index count = offset.axes ? offset.sizes[0] : 1;
        if (offset.axes > 1 || (count != 1 && count != call_.q.sizes[0]))
            return calls.refuse("relskew: `offset` must be one number, or one for each item of the batch");
        offsets_ = static_cast<const Index *>(offset.data), call_.offset = count ? *offsets_ : 0;
        for (Index i = 1; i < count; i++) differ_ = differ_ || offsets_[i] != *offsets_;
        return true;
    }

    // Skip the rows of tables before and after those of the call.
    void cut_tables() {
        const Index first = node_.lead - call_.left, rows = call_.left + call_.right + 1;
        for (relskew_array *x : {&call_.rel_k, &call_.rel_v, &call_.key_table, &call_.rel_bias}) {
            const int axis = x->axes - (x == &call_.rel_bias ? 1 : 2);
            if (!x->data || axis < 0 || node_.lead < 0 || first < 0 || x->sizes[axis] < first + rows) continue;
            x->data = static_cast<char *>(x->data) + first * x->steps[axis] * node_.of.bytes, x->sizes[axis] = rows;
        }
    }

    // Read an input if there is one, (batch, length, heads · width) as four axes.
    bool read(std::size_t number, relskew_array &to) {
        const Value *value = nullptr;
        Shape *shape = nullptr;
        if (!calls(ort_.input()(context_, number, &value)) || !value) return !calls.status;
        if (!calls(ort_.shape()(value, &shape))) return false;
        std::size_t axes = 0;
        const bool known = calls(ort_.count_axes()(shape, &axes)) &&
                           (axes <= 4 || calls.refuse("relskew: an input has more than 4 axes")) &&
                           calls(ort_.sizes()(shape, to.sizes, axes)) &&
                           calls(ort_.data()(const_cast<Value *>(value), &to.data));
        ort_.free_shape()(shape);
        if (!known) return false;
        static Index nothing;
        if (!to.data) to.data = &nothing;  // an empty array needs an address
        to.axes = static_cast<std::int32_t>(axes), set_steps(to);
        const Index heads = number == Q ? node_.heads : node_.kv_heads;
        if (number > V || axes != 3 || heads < 1 || to.sizes[2] % heads) return true;
        side_by_side_ = side_by_side_ || number == Q;
        split(to, heads);
        return true;
    }

    static void set_steps(relskew_array &x) {
        for (Index i = x.axes - 1, step = 1; i >= 0; step *= x.sizes[i--]) x.steps[i] = step;
    }

    static void split(relskew_array &x, Index heads) {
        const Index batch = x.sizes[0], length = x.sizes[1], all = x.sizes[2], width = all / heads;
        x = {x.data, 4, {batch, heads, length, width}, {length * all, width, all, 1}};
    }

    // Request an output; a missing output has no data.
    bool make(std::size_t number, std::initializer_list<Index> sizes, relskew_array &to) {
        Value *value = nullptr;
        to.axes = static_cast<std::int32_t>(sizes.size());
        std::copy(sizes.begin(), sizes.end(), to.sizes), set_steps(to);
        if (!calls(ort_.output()(context_, number, to.sizes, sizes.size(), &value))) return false;
        return !value || calls(ort_.data()(value, &to.data));
    }

    // Append the new keys and values to the past, in place if there is an offset; attention sees all of them.
    bool append(relskew_array (&present)[2]) {
        if (!inputs_[PAST_KEY].data && !inputs_[PAST_VALUE].data) return true;
        if (!offsets_) call_.offset = inputs_[PAST_KEY].sizes[2];
        for (std::size_t i : {0, 1}) {
            const relskew_array &past = inputs_[PAST_KEY + i];
            relskew_array &added = i ? call_.v : call_.k;
            const Index count = added.sizes[2], batch = added.sizes[0], heads = added.sizes[1], width = added.sizes[3];
            if (!past.data || past.axes != 4 || past.sizes[0] != batch || past.sizes[1] != heads ||
                past.sizes[3] != width)
                return calls.refuse(
                    "relskew: a past must have the sizes of the new keys and values, except for its length");
            const Index room = past.sizes[2] + (offsets_ ? 0 : count);
            if (!make(PRESENT_KEY + i, {batch, heads, room, width}, present[i])) return false;
            if (!present[i].data) return calls.refuse("relskew: a node with a past must give the present");
            for (Index item = 0; item < batch; item++) {
                if (offset(item) < 0 || offset(item) > room - count) return too_full(offset(item), count, room);
                for (Index head = 0; head < heads; head++) put(past, added, present[i], item, head);
            }
            added = present[i];
        }
        return true;
    }

    Index offset(Index item) const { return differ_ ? offsets_[item] : call_.offset; }

    bool too_full(Index filled, Index count, Index room) {
        char why[160];
        std::snprintf(why, sizeof why,
                      "relskew: a cache has room for %lld positions: %lld are filled, and %lld do not fit behind them",
                      static_cast<long long>(room), static_cast<long long>(filled), static_cast<long long>(count));
        return calls.refuse(why);
    }

    // Copy the past of a head, unless it is there already, and append the new rows.
    void put(const relskew_array &past, const relskew_array &added, const relskew_array &to, Index item, Index head) {
        const Index bytes = node_.of.bytes, row = to.sizes[3] * bytes, count = added.sizes[2], first = offset(item);
        const auto at = [&](const relskew_array &x, Index i) {
            return static_cast<char *>(x.data) + (item * x.steps[0] + head * x.steps[1] + i * x.steps[2]) * bytes;
        };
        const auto copy = [&](const relskew_array &from, Index from_row, Index to_row, Index rows) {
            std::memcpy(at(to, to_row), at(from, from_row), static_cast<std::size_t>(rows * row));
        };
        if (past.data != to.data) {
            copy(past, 0, 0, first);
            if (past.sizes[2] > first + count) copy(past, first + count, first + count, past.sizes[2] - first - count);
        }
        if (added.steps[2] == to.steps[2]) return copy(added, 0, first, count);
        for (Index i = 0; i < count; i++) copy(added, i, first + i, 1);
    }

    bool attend(bool cached) {
        const Index batch = call_.q.sizes[0], heads = call_.q.sizes[1], queries = call_.q.sizes[2];
        const Index width = call_.v.sizes[3];
        const bool made = side_by_side_ ? make(OUT, {batch, queries, heads * width}, call_.out)
                                        : make(OUT, {batch, heads, queries, width}, call_.out);
        if (!made || !make(LSE, {batch, heads, queries}, call_.lse)) return false;
        if (batch == 0 || queries == 0) return true;
        if (side_by_side_) split(call_.out, heads);
        for (Index first = 0, end; first < batch; first = end) {  // consecutive items with the same offset
            for (end = differ_ ? first + 1 : batch; end < batch && offset(end) == offset(first);) end++;
            if (!attend(first, end, cached)) return false;
        }
        return true;
    }

    bool attend(Index first, Index end, bool cached) {
        relskew_call some = call_;
        some.offset = offset(first);
        const Index bytes = node_.of.bytes, of_lse = node_.of.type == FLOAT64 ? 8 : 4;
        const auto cut = [&](relskew_array &x, std::int32_t axes, Index size) {
            if (!x.data || x.axes < axes || x.sizes[0] == 1) return;
            x.data = static_cast<char *>(x.data) + first * x.steps[0] * size, x.sizes[0] = end - first;
        };
        for (relskew_array *x : {&some.q, &some.k, &some.v, &some.rel_q, &some.out}) cut(*x, 4, bytes);
        cut(some.lse, 3, of_lse), cut(some.mask, 4, some.mask_adds ? bytes : 1);
        for (relskew_array *x : {&some.q_segments, &some.k_segments, &some.q_positions, &some.k_positions})
            cut(*x, 2, sizeof(Index));
        if (cached) {  // only the filled part of the cache
            const Index keys = some.offset + some.q.sizes[2];
            some.k.sizes[2] = some.v.sizes[2] = keys;
            for (relskew_array *x : {&some.mask, &some.k_segments})
                if (x->data && x->axes && x->sizes[x->axes - 1] > 1) x->sizes[x->axes - 1] = keys;
        }
        if (some.k_segments.data && !some.q_segments.data) {  // the queries are the last of the keys
            some.q_segments = some.k_segments;
            some.q_segments.data = static_cast<Index *>(some.q_segments.data) + some.offset;
            some.q_segments.sizes[some.q_segments.axes - 1] = some.q.sizes[2];
        }
        const Memory made(node_.by_distance && some.rel_bias.data ? make_bias(some) : nullptr);
        if (node_.by_distance && some.rel_bias.data && !made)
            return calls.refuse("relskew: not enough memory for a bias by distance, or the bias is in half precision");
        char why[240] = "relskew: ";
        const std::size_t start = std::strlen(why);
        Text text(why + start, sizeof why - start);
        return attend_for_host(some, {on_threads, this, processors}, text) || calls.refuse(why);
    }

    using Memory = std::unique_ptr<void, Free>;

    // Materialise a bias by distance for the positions of a call; null if there is no memory, or in half precision.
    void *make_bias(relskew_call &some) const {
        some.left = std::max<Index>(0, some.offset + some.q.sizes[2] - 1);
        some.right = std::max(-some.left, some.k.sizes[2] - 1 - some.offset);
        const relskew_array slopes = some.rel_bias;
        const Index heads = slopes.sizes[0], rows = some.left + some.right + 1;
        void *made = std::malloc(static_cast<std::size_t>(heads * rows * node_.of.bytes));
        const auto fill = [&](auto *to, const auto *from) {
            for (Index head = 0; head < heads; head++)
                for (Index c = 0; c < rows; c++)
                    to[head * rows + c] =
                        from[head] * static_cast<decltype(from[0] + from[0])>(std::abs(c - some.left));
        };
        if (made && node_.of.type == FLOAT32) fill(static_cast<float *>(made), static_cast<float *>(slopes.data));
        if (made && node_.of.type == FLOAT64) fill(static_cast<double *>(made), static_cast<double *>(slopes.data));
        if (node_.of.bytes == 2) std::free(made), made = nullptr;
        some.rel_bias = {made, 2, {heads, rows}, {rows, 1}};
        return made;
    }

    // Run on the threads of the runtime, of which there may be fewer.
    static void on_threads(void *run, void (*work)(void *), void *of, Index count) {
        struct Turns {
            void (*work)(void *);
            void *of;
        } turns{work, of};
        const auto turn = [](void *all, std::size_t) {
            const Turns &own = *static_cast<Turns *>(all);
            own.work(own.of);
        };
        Run &own = *static_cast<Run *>(run);
        own.calls(own.ort_.on_threads()(own.context_, turn, static_cast<std::size_t>(count), 0, &turns));
    }
};

Status *make(const Operator *op, const Functions *ort, const Info *info, void **kernel) {
    Calls calls{*ort};
    void *place = std::malloc(sizeof(Node));
    if (!place) return ort->make_status()(FAIL, "relskew: not enough memory");
    Node *node = new (place) Node{*static_cast<const RelativeAttention *>(op), *ort};
    if (node->read(info, calls))
        *kernel = node;
    else
        std::free(node);
    return calls.status;
}

Status *run(void *kernel, Context *context) {
    Run run(*static_cast<Node *>(kernel), context);
    run();
    return run.calls.status;
}

RelativeAttention operator_of(Type type, relskew_type own_type, Index bytes) {
    RelativeAttention made{};
    made.version = VERSION;
    made.type = type, made.own_type = own_type, made.bytes = bytes;
    const auto own = [](const Operator *op) { return static_cast<const RelativeAttention *>(op)->type; };
    static constexpr auto OWN = own;
    made.name = [](const Operator *) { return "RelativeAttention"; };
    made.provider = [](const Operator *) -> const char * { return nullptr; };  // the CPU
    made.input_type = [](const Operator *op, std::size_t i) {
        return INPUTS[i].type == UNDEFINED ? OWN(op) : INPUTS[i].type;
    };
    made.input_count = [](const Operator *) { return INPUT_COUNT; };
    made.output_type = [](const Operator *op, std::size_t i) {
        return i != LSE || OWN(op) == FLOAT64 ? OWN(op) : FLOAT32;
    };
    made.output_count = [](const Operator *) { return OUTPUT_COUNT; };
    made.destroy = [](void *kernel) { std::free(kernel); };
    made.input_kind = [](const Operator *, std::size_t i) { return i > V ? 1 : 0; };
    made.output_kind = [](const Operator *, std::size_t i) { return i == OUT ? 0 : 1; };
    made.input_memory = [](const Operator *, std::size_t) { return 0; };
    made.make = make, made.run = run;
    made.first_version = made.last_version = [](const Operator *) { return 1; };
    return made;
}

const RelativeAttention operators[] = {
    operator_of(FLOAT32, RELSKEW_FLOAT32, 4),
    operator_of(FLOAT64, RELSKEW_FLOAT64, 8),
    operator_of(FLOAT16, RELSKEW_FLOAT16, 2),
    operator_of(BFLOAT16, RELSKEW_BFLOAT16, 2),
};

}  // namespace

extern "C" __attribute__((visibility("default"))) Status *RegisterCustomOps(Options *options, const Base *base) {
    const Functions *ort = base->functions(VERSION);
    if (!ort)
        return base->functions(1)->make_status()(
            FAIL, "relskew: the operators need onnxruntime 1.17 or newer: this one is older");
    Calls calls{*ort};
    Domain *domain = nullptr;  // it lives as long as the library
    if (!calls(ort->make_domain()("relskew", &domain))) return calls.status;
    for (const RelativeAttention &each : operators)
        if (!calls(ort->add_operator()(domain, &each))) return calls.status;
    calls(ort->add_domain()(options, domain));
    return calls.status;
}
