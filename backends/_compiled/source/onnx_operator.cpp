// `relskew::RelativeAttention` for onnxruntime; a session loads it with `register_custom_ops_library`.
#include <cfloat>
#include <cstring>

#include "onnx_node.hpp"

namespace {

const Index processors = count_processors();  // once: the C library reads a file, which takes as long as a token

// One run of a node.
class Run {
    const Node &node_;
    const Functions &ort_;
    Context *const context_;
    relskew_call call_;
    relskew_array inputs_[INPUT_COUNT] = {};
    const Index *offsets_ = nullptr;  // one for each item, or one for all
    bool differ_ = false, side_by_side_ = false, in_int8_ = false;

public:
    Calls calls;

    Run(const Node &node, Context *context)
        : node_(node), ort_(node.ort), context_(context), call_(node.call), calls{node.ort} {}

    void operator()() {
        bool cached = false;
        if (read() && append(cached)) attend(cached);
    }

private:
    struct End {
        std::size_t number;
        std::int64_t *to;
    };

    bool read() {
        for (std::size_t i = 0; i < INPUT_COUNT; i++) {
            if (!read(i, inputs_[i])) return false;
            if (!INPUTS[i].at || !inputs_[i].data) continue;
            if ((call_.*INPUTS[i].at).data)
                return calls.refuse(
                    "relskew: pass either `mask` or `added`, not both, and a table either in int8 or not");
            call_.*INPUTS[i].at = inputs_[i];
        }
        for (std::size_t i = 0; i < 2; i++)
            if (!inputs_[TABLES_INT8 + i].data != !inputs_[TABLES_SCALE + i].data)
                return calls.refuse("relskew: a table in int8 must have one scale for each of its rows");
        call_.mask_adds = inputs_[ADDED].data != nullptr;
        for (const auto &[number, to] : {End{SPAN_LEFT, &call_.left}, End{SPAN_RIGHT, &call_.right}}) {
            const relskew_array &given = inputs_[number];
            if (!given.data) continue;
            if (given.axes > 1 || (given.axes && given.sizes[0] != 1))
                return calls.refuse("relskew: `span_left` and `span_right` must be numbers");
            *to = *static_cast<const Index *>(given.data);
        }
        cut_tables();
        for (const relskew_array *x : {&call_.q, &call_.k, &call_.v})
            if (x->axes != 4)
                return calls.refuse(
                    "relskew: `q`, `k` and `v` must be (batch, heads, length, width) or (batch, length, "
                    "heads * width)");
        relskew_array &sinks = call_.sinks;
        if (sinks.axes == 3 && sinks.sizes[0] == call_.q.sizes[1] && sinks.sizes[1] == 1 && sinks.sizes[2] == 1)
            sinks.axes = 1;  // (heads, 1, 1)
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
        const auto cut = [&](relskew_array &x, int axes_behind, Index bytes) {
            const int axis = x.axes - 1 - axes_behind;
            if (!x.data || axis < 0 || node_.lead < 0 || first < 0 || x.sizes[axis] < first + rows) return;
            x.data = static_cast<char *>(x.data) + first * x.steps[axis] * bytes, x.sizes[axis] = rows;
        };
        const Index bytes = node_.of.bytes;
        cut(call_.rel_k, 1, call_.rel_k_scale.data ? 1 : bytes);
        cut(call_.rel_v, 1, call_.rel_v_scale.data ? 1 : bytes);
        cut(call_.rel_k_scale, 0, sizeof(float)), cut(call_.rel_v_scale, 0, sizeof(float));
        cut(call_.key_table, 1, bytes), cut(call_.rel_bias, 0, bytes);
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
    bool append(bool &cached) {
        const auto is_given = [this](std::size_t first) { return inputs_[first].data || inputs_[first + 1].data; };
        in_int8_ = is_given(PAST_INT8) || is_given(PAST_SCALE), cached = in_int8_ || is_given(PAST);
        if (!cached) return true;
        if (in_int8_ && is_given(PAST)) return calls.refuse("relskew: pass a past, or a past in int8, not both");
        if (!offsets_) call_.offset = inputs_[in_int8_ ? PAST_INT8 : PAST].sizes[2];
        return append(0, call_.k, call_.k_scale) && append(1, call_.v, call_.v_scale);
    }

    bool append(std::size_t number, relskew_array &added, relskew_array &scale) {
        const relskew_array &past = inputs_[(in_int8_ ? PAST_INT8 : PAST) + number];
        const relskew_array &past_scale = inputs_[PAST_SCALE + number];
        const Index count = added.sizes[2], batch = added.sizes[0], heads = added.sizes[1], width = added.sizes[3];
        if (!past.data || past.axes != 4 || past.sizes[0] != batch || past.sizes[1] != heads || past.sizes[3] != width)
            return calls.refuse(
                "relskew: a past must have the sizes of the new keys and values, except for its length");
        if (in_int8_ &&
            (!past_scale.data || past_scale.axes != 3 || !std::equal(past.sizes, past.sizes + 3, past_scale.sizes)))
            return calls.refuse("relskew: a past in int8 must have one scale for each of its rows");
        const Index room = past.sizes[2] + (offsets_ ? 0 : count);
        relskew_array present = {}, present_scale = {};
        if (!make((in_int8_ ? PRESENT_INT8 : PRESENT) + number, {batch, heads, room, width}, present)) return false;
        if (in_int8_ && !make(PRESENT_SCALE + number, {batch, heads, room}, present_scale)) return false;
        if (!present.data || (in_int8_ && !present_scale.data))
            return calls.refuse("relskew: a node with a past must give the present");
        for (Index item = 0; item < batch; item++) {
            const Index first = offset(item);
            if (first < 0 || first > room - count) return too_full(first, count, room);
            for (Index head = 0; head < heads; head++) {
                keep(past, present, in_int8_ ? 1 : node_.of.bytes, item, head, first, count);
                if (in_int8_) keep(past_scale, present_scale, sizeof(float), item, head, first, count);
                for (Index i = 0; in_int8_ && i < count; i++)
                    *static_cast<float *>(row_of(present_scale, sizeof(float), item, head, first + i)) =
                        quantise(row_of(added, node_.of.bytes, item, head, i), width,
                                 static_cast<std::int8_t *>(row_of(present, 1, item, head, first + i)));
                if (!in_int8_) put(added, present, item, head, first, count);
            }
        }
        added = present, scale = present_scale;
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

    static void *row_of(const relskew_array &x, Index bytes, Index item, Index head, Index i) {
        return static_cast<char *>(x.data) + (item * x.steps[0] + head * x.steps[1] + i * x.steps[2]) * bytes;
    }

    // Copy the past of a head, unless it is there already, except for `count` rows.
    static void keep(const relskew_array &past, const relskew_array &to, Index bytes, Index item, Index head,
                     Index first, Index count) {
        const auto copy = [&](Index row, Index rows) {
            std::memcpy(row_of(to, bytes, item, head, row), row_of(past, bytes, item, head, row),
                        static_cast<std::size_t>(rows * to.steps[2] * bytes));
        };
        if (past.data == to.data) return;
        copy(0, first);
        if (past.sizes[2] > first + count) copy(first + count, past.sizes[2] - first - count);
    }

    // Write the new rows of a head.
    void put(const relskew_array &added, const relskew_array &to, Index item, Index head, Index first, Index count) {
        const Index bytes = node_.of.bytes, together = added.steps[2] == to.steps[2] ? count : 1;
        for (Index i = 0; i < count; i += together)
            std::memcpy(row_of(to, bytes, item, head, first + i), row_of(added, bytes, item, head, i),
                        static_cast<std::size_t>(together * to.steps[2] * bytes));
    }

    // Round a row to multiples of its scale, which is returned; NaN if a number is not finite.
    float quantise(const void *row, Index width, std::int8_t *to) const {
        switch (node_.of.type) {
            case FLOAT64: return quantise(static_cast<const double *>(row), width, to);
            case FLOAT16: return quantise(static_cast<const Float16 *>(row), width, to);
            case BFLOAT16: return quantise(static_cast<const BFloat16 *>(row), width, to);
            default: return quantise(static_cast<const float *>(row), width, to);
        }
    }

    template <class T>
    static float quantise(const T *row, Index width, std::int8_t *to) {
        constexpr float NEAREST = 12582912;  // a sum with it is rounded to a whole number
        float most = 0, zero = 0;
        for (Index d = 0; d < width; d++) {
            const float x = static_cast<float>(row[d]);
            most = std::max(most, std::fabs(x)), zero += x * 0;
        }
        const float scale = most / 127, divisor = scale > FLT_MIN ? scale : 1;
        if (zero != 0) return std::memset(to, 0, static_cast<std::size_t>(width)), NAN;
        for (Index d = 0; d < width; d++) {
            const float rounded = static_cast<float>(row[d]) / divisor + NEAREST;
            to[d] = static_cast<std::int8_t>(rounded - NEAREST);
        }
        return scale;
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
        const Index bytes = node_.of.bytes, of_lse = node_.of.type == FLOAT64 ? 8 : 4, of_keys = in_int8_ ? 1 : bytes;
        const auto cut = [&](relskew_array &x, std::int32_t axes, Index size) {
            if (!x.data || x.axes < axes || x.sizes[0] != call_.q.sizes[0]) return;  // shared, or refused below
            x.data = static_cast<char *>(x.data) + first * x.steps[0] * size, x.sizes[0] = end - first;
        };
        for (relskew_array *x : {&some.q, &some.rel_q, &some.out}) cut(*x, 4, bytes);
        for (relskew_array *x : {&some.k, &some.v}) cut(*x, 4, of_keys);
        for (relskew_array *x : {&some.k_scale, &some.v_scale}) cut(*x, 3, sizeof(float));
        cut(some.sinks, 3, bytes), cut(some.lse, 3, of_lse), cut(some.mask, 4, some.mask_adds ? bytes : 1);
        for (relskew_array *x : {&some.q_segments, &some.k_segments, &some.q_positions, &some.k_positions})
            cut(*x, 2, sizeof(Index));
        if (cached) {  // only the filled part of the cache
            const Index keys = some.offset + some.q.sizes[2];
            for (relskew_array *x : {&some.k, &some.v, &some.k_scale, &some.v_scale}) x->sizes[2] = keys;
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
        struct Parts {
            void (*work)(void *);
            void *of;
        } turns{work, of};
        const auto turn = [](void *all, std::size_t) {
            const Parts &own = *static_cast<Parts *>(all);
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
        if (i >= PRESENT_INT8) return i < PRESENT_SCALE ? INT8 : FLOAT32;
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
