#include "host.hpp"

#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>

#include "integers.hpp"
#include "levels.hpp"

namespace {

const Level &best() {
    look_at_processor();
    const Level *found = levels;
    for (const Level &level : levels)
        if (level.here) found = &level;
    return *found;
}

const Level &chosen = best();

// An array of a call, by its name in problem.hpp.
#define OF(NAME) {#NAME, &relskew_call::NAME}
const relskew_array *named(const relskew_call &call, const char *name) {
    constexpr struct {
        const char *name;
        relskew_array relskew_call::*at;
    } ALL[] = {OF(q),          OF(k),          OF(v),           OF(rel_k),       OF(rel_v),
               OF(rel_bias),   OF(rel_q),      OF(key_table),   OF(mask),        OF(k_scale),
               OF(out),        OF(v_scale),    OF(rel_k_scale), OF(rel_v_scale), OF(lse),
               OF(q_segments), OF(k_segments), OF(q_positions), OF(k_positions)};
    for (const auto &[own, at] : ALL)
        if (!std::strcmp(own, name)) return &(call.*at);
    return nullptr;
}

Index size_of(const relskew_array &x, int from_last) {
    return x.data && from_last < x.axes ? x.sizes[x.axes - 1 - from_last] : 1;
}

View view_of(const relskew_array &x) {
    View view{x.data, x.axes, {}, {}};
    std::copy(x.sizes, x.sizes + 4, view.sizes), std::copy(x.steps, x.steps + 4, view.steps);
    return view;
}

// Reads the arrays of a call by the names that problem.hpp declares.
struct HostArguments {
    const relskew_call &call;
    Text &error;

    template <class Given>
    bool operator()(const char *name, Given &to, Need need, const Axes &axes) {
        constexpr bool are_integers = std::is_same_v<Given, Integers>;
        using T = std::conditional_t<are_integers, std::int64_t, std::remove_pointer_t<decltype(to.at)>>;
        const relskew_array *from = named(call, name);
        const bool given = from && from->data;
        if (are_integers && need == (given ? Need::NOT : Need::MUST))
            return error.refuse("`%s` must be given for queries and keys, or for neither", name + 2);
        if (!given) return need != Need::MUST || error.refuse("`%s` is missing", name);
        if (need == Need::NOT) return true;
        if (from->axes < 0 || from->axes > 4)
            return error.refuse("`%s` must have up to 4 axes, got %d", name, from->axes);
        const View view = view_of(*from);
        const int last = view.count - 1;
        if (axes.column.kind != Axis::NONE && last >= 0 && view.sizes[last] > 1 && view.steps[last] != 1)
            return error.refuse("`%s` must be contiguous along its last axis", name);
        if (reinterpret_cast<std::uintptr_t>(view.at) % alignof(T))
            return error.refuse("`%s` must be aligned to its type", name);
        if constexpr (are_integers) {
            to.wide = true;
            if (size_of(*from, 0) != axes.column.size)
                return error.refuse("`%s` must have a length of %lld, got %lld", name,
                                    static_cast<long long>(axes.column.size),
                                    static_cast<long long>(size_of(*from, 0)));
        }
        const char *fault = place(view, axes, to);
        return !fault || error.refuse("`%s` %s", name, fault);
    }
};

// The lowest and the highest relative position that some query sees; false if no query sees a key.
bool seen_positions(const Sizes &x, const Narrowed &positions, Index &lowest, Index &highest) {
    if (positions.of_keys) {
        lowest = std::max(positions.low, -x.before), highest = std::min(positions.high, x.after);
        return lowest <= highest;
    }
    const auto seen = [&](Index p) { return Seen::positions(x, p, p).within(0, x.keys); };
    Index low = std::max(x.offset, -x.after);  // positions of the queries that see a key
    Index high = std::min(x.offset + x.queries - 1, x.keys - 1 + x.before);
    if (x.block) {
        low = std::max<Index>(low, 0);
        high = std::min(high, ((x.keys - 1) / x.block + 1 + x.behind) * x.block - 1);
    }
    if (low > high || seen(low).none()) return false;
    Index back = high, ahead = low;
    if (x.block) {  // a block's last query sees furthest back, and its first one furthest ahead
        back = std::max(low, floored(high + 1, x.block) - 1);
        ahead = std::min(high, floored(low + x.block - 1, x.block));
    }
    lowest = std::min(seen(high).low - high, seen(back).low - back);
    highest = std::max(seen(low).high - 1 - low, seen(ahead).high - 1 - ahead);
    return true;
}

bool reached(const relskew_call &call, const Sizes &x, const Narrowed &positions, Text &error) {
    const char *const first = call.rel_k.data       ? "rel_k"
                              : call.rel_v.data     ? "rel_v"
                              : call.rel_bias.data  ? "rel_bias"
                              : call.key_table.data ? "key_table"
                                                    : nullptr;
    Index low = 0, high = 0;
    if (!first || call.beyond != RELSKEW_ERROR || !seen_positions(x, positions, low, high)) return true;
    if (-low <= call.left && high <= call.right) return true;
    return error.refuse(
        "`%s` reaches relative positions %lld ... %lld, but this call needs %lld ... %lld: use a longer table, or "
        "set beyond to \"clip\" or \"zero\"",
        first, static_cast<long long>(-call.left), static_cast<long long>(call.right), static_cast<long long>(low),
        static_cast<long long>(high));
}

// Read the numbers of a call, as `_compiled/call.py` does in Python.
template <class Stored>
void read_numbers(const relskew_call &call, ProblemOf<Stored> &x) {
    x.items = size_of(call.q, 3), x.heads = size_of(call.q, 2), x.queries = size_of(call.q, 1);
    x.key_heads = size_of(call.k, 2), x.keys = size_of(call.k, 1);
    x.width = size_of(call.q, 0), x.value_width = size_of(call.v, 0);
    x.rel_width = call.rel_k.data ? size_of(call.rel_k, 0) : 0;
    x.left = call.left, x.rows = call.left + call.right + 1, x.clip = call.beyond == RELSKEW_CLIP;
    const auto side = [](Index given) { return given < 0 ? UNBOUNDED : given; };
    const bool local = call.blocks_before < 0;
    x.before = side(call.window_left);
    x.after = call.causal || (call.block_size && local) ? 0 : side(call.window_right);
    x.block = call.block_size, x.behind = local ? 1 : call.blocks_before;
    using Real = typename ProblemOf<Stored>::Real;
    const double scale = std::isnan(call.scale) ? 1 / std::sqrt(static_cast<double>(x.width)) : call.scale;
    x.offset = call.offset, x.mask_adds = call.mask_adds != 0, x.kept = 1;
    x.in_int8 = call.k_scale.data || call.v_scale.data;
    x.rel_k_in_int8 = call.rel_k_scale.data != nullptr, x.rel_v_in_int8 = call.rel_v_scale.data != nullptr;
    x.scale = static_cast<Real>(scale);
    x.rel_scale = static_cast<Real>(std::isnan(call.rel_scale) ? scale : call.rel_scale);
    x.softcap = static_cast<Real>(call.softcap);
}

// Read the sinks: (H), or a number for each query.
template <class Stored>
bool read_sinks(const relskew_array &given, const ProblemOf<Stored> &x, Array<const Stored> &to) {
    View view = view_of(given);
    if (view.count == 1) view.sizes[1] = 1, view.count = 2;
    return view.count > 0 && view.count < 4 &&
           !place(view, {{x.items, Axis::ANY}, {x.heads}, {x.queries, Axis::ANY}, {1, Axis::NONE}}, to);
}

// Count the sinks in each row's softmax: one more logit, without a value.
template <class Stored>
void count_sinks(const ProblemOf<Stored> &x, const Array<const Stored> &sinks) {
    using Real = typename ProblemOf<Stored>::Real;
    for (Index item = 0; item < x.items; item++)
        for (Index head = 0; head < x.heads; head++)
            for (Index i = 0; i < x.queries; i++) {
                const Real sink = *sinks.of(item, head, i);
                if (sink == -std::numeric_limits<Real>::infinity()) continue;
                const Real *const sums = x.sums.of(item, head, i);
                const Real top = std::max(sums[0], sink), own = std::exp(sums[0] - top + sums[1]);
                const Real total = own + std::exp(sink - top);
                Stored *const row = x.out.of(item, head, i);
                for (Index c = 0; c < x.value_width; c++) row[c] = Stored(static_cast<Real>(row[c]) * (own / total));
                if (x.lse) *x.lse.of(item, head, i) = top + std::log(total);
            }
}

// Dequantise a table, which more than few queries read repeatedly; false if there is no memory.
template <class Stored>
bool dequantise(const ProblemOf<Stored> &x, const Array<const std::int8_t> &from, const Array<const float> &scales,
                Array<const Stored> &to, Memory<Stored> &own) {
    using Real = typename ProblemOf<Stored>::Real;
    if (!from || is_few(x)) return true;
    const Index heads = from.sizes[1], width = from.sizes[3];
    if (!(own = memory<Stored>(heads * x.rows * width, false))) return false;
    to.at = own.get(), to.head = heads > 1 ? x.rows * width : 0, to.row = width, to.column = 1;
    Stored *at = own.get();
    for (Index head = 0; head < heads; head++)
        for (Index row = 0; row < x.rows; row++)
            for (Index d = 0; d < width; d++)
                *at++ =
                    Stored(static_cast<Real>(from.of(0, head, row)[d]) * static_cast<Real>(*scales.of(0, head, row)));
    return true;
}

template <class Stored>
bool attend(const relskew_call &call, const HostTeam &team, Text &error) {
    ProblemOf<Stored> x{};
    read_numbers(call, x);
    if (x.rows < 1) return error.refuse("`left` and `right` must describe a table with at least one row");
    if (call.block_size < 0) return error.refuse("`block_size` must not be negative");
    if (x.is_too_large()) return error.refuse("the call is too large");
    HostArguments from{call, error};
    if (!x.arrays(from) || !x.quantised(from) || !x.integers(from) || !x.results(from)) return false;
    Array<const Stored> sinks;
    if (call.sinks.data && !read_sinks(call.sinks, x, sinks))
        return error.refuse("`sinks` must have a number for each head, or for each query of each head");
    if (x.items == 0 || x.heads == 0 || x.queries == 0 || x.value_width == 0) return true;
    OwnIntegers own;
    if (const char *wrong = prepare(x, own)) return error.refuse("%s", wrong);
    if (!reached(call, x, own.positions, error)) return false;
    Memory<typename ProblemOf<Stored>::Real> sums;
    if (sinks && !(sums = make_sums(x))) return error.refuse("not enough memory");
    x.narrow();
    Memory<Stored> rel_k, rel_v;
    if (!dequantise(x, x.rel_k_int8, x.rel_k_scale, x.rel_k, rel_k) ||
        !dequantise(x, x.rel_v_int8, x.rel_v_scale, x.rel_v, rel_v))
        return error.refuse("not enough memory");
    Tasks tasks(x, static_cast<bool>(x.k_positions), grain_of_attend(x));
    const auto threads = [&team](void (*work)(void *), void *of, Index count) { team.run(team.of, work, of, count); };
    if (!tasks.make() || !run_tasks(chosen.of<Stored>().attend, x, tasks, threads, std::max<Index>(1, team.threads)))
        return error.refuse("not enough memory");
    if (sinks) count_sinks(x, sinks);
    return true;
}

}  // namespace

bool attend_for_host(const relskew_call &call, const HostTeam &team, Text &error) {
    switch (call.type) {
        case RELSKEW_FLOAT32: return attend<float>(call, team, error);
        case RELSKEW_FLOAT64: return attend<double>(call, team, error);
        case RELSKEW_FLOAT16: return attend<Float16>(call, team, error);
        case RELSKEW_BFLOAT16: return attend<BFloat16>(call, team, error);
        default: return error.refuse("`type` must be one of relskew_type, got %d", call.type);
    }
}

extern "C" __attribute__((visibility("default"))) int relskew_attention(const relskew_call *call, char *error,
                                                                        size_t length) {
    Text text(error, length);
    if (!call || call->size < sizeof(relskew_call)) return text.refuse("`size` must be sizeof(relskew_call)"), 1;
    const auto run = [](void *, void (*work)(void *), void *of, Index count) {
        run_on_new_threads(work, of, static_cast<unsigned>(count), 0);
    };
    return attend_for_host(*call, {run, nullptr, call->threads}, text) ? 0 : 1;
}
