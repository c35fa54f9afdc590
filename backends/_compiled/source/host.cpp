#include "host.hpp"

#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>

#include "levels.hpp"

namespace {

constexpr Index APART = Index{1} << 30;  // how far apart the integers of queries and keys may be

const Level &best() {
    look_at_processor();
    const Level *found = levels;
    for (const Level &level : levels)
        if (level.here) found = &level;
    return *found;
}

const Level &chosen = best();

// An array of a call, by its name in problem.hpp.
const relskew_array *named(const relskew_call &call, const char *name) {
    constexpr struct {
        const char *name;
        relskew_array relskew_call::*at;
    } ALL[] = {
        {"q", &relskew_call::q},         {"k", &relskew_call::k},
        {"v", &relskew_call::v},         {"rel_k", &relskew_call::rel_k},
        {"rel_v", &relskew_call::rel_v}, {"rel_bias", &relskew_call::rel_bias},
        {"rel_q", &relskew_call::rel_q}, {"key_table", &relskew_call::key_table},
        {"mask", &relskew_call::mask},   {"k_scale", &relskew_call::k_scale},
        {"out", &relskew_call::out},     {"v_scale", &relskew_call::v_scale},
        {"lse", &relskew_call::lse},
    };
    for (const auto &[own, at] : ALL)
        if (!std::strcmp(own, name)) return &(call.*at);
    return nullptr;
}

Index size_of(const relskew_array &x, int from_last) {
    return x.data && from_last < x.axes ? x.sizes[x.axes - 1 - from_last] : 1;
}

// The integers of queries and keys as the kernels read them: 32 bits, shifted to their minimum; keys are padded.
class Labels {
    Memory<std::int32_t> of_queries_, of_keys_;
    const relskew_array &q_, &k_;
    const char *const name_;
    Index first_ = 0, last_ = 0;

public:
    Labels(const relskew_array &q, const relskew_array &k, const char *name) : q_(q), k_(k), name_(name) {}

    explicit operator bool() const { return static_cast<bool>(of_keys_); }
    // The lowest and the highest difference of a key's and a query's integer.
    Index low = 0, high = 0;

    bool read(Index queries, Index keys, Index block, Text &error) {
        if (!q_.data && !k_.data) return true;
        if (!q_.data || !k_.data) return error.refuse("`%s` must be given for queries and keys, or for neither", name_);
        for (const relskew_array *x : {&q_, &k_}) {
            const Index wanted = x == &q_ ? queries : keys, given = size_of(*x, 0);
            if (x->axes < 1 || x->axes > 2 || given != wanted)
                return error.refuse("`%s` must have a length of %lld, got %lld", name_, static_cast<long long>(wanted),
                                    static_cast<long long>(given));
        }
        if (!queries || !keys) return true;
        Index ends[2][2];
        for (const relskew_array *x : {&q_, &k_}) {
            Index(&own)[2] = ends[x == &k_];
            own[0] = own[1] = at(*x, 0, 0);
            each(*x, [&](Index, Index, Index value) {
                own[0] = std::min(own[0], value), own[1] = std::max(own[1], value);
            });
        }
        first_ = std::min(ends[0][0], ends[1][0]), last_ = std::max(ends[0][1], ends[1][1]);
        Memory<Index> values;  // if numbers are far apart, their ranks replace them
        Index count = 0;
        if (last_ - APART >= first_) {
            if (block) return error.refuse("`%s` must be less than 2**30 apart", name_);
            values = memory<Index>(size_of(k_, 1) * keys);
            if (!values) return error.refuse("not enough memory");
            each(k_, [&](Index, Index, Index value) { values[count++] = value; });
            std::sort(values.get(), values.get() + count);
        }
        const Index from = block ? floored(first_, block) : first_;
        low = ends[1][0] - ends[0][1], high = ends[1][1] - ends[0][0];
        const auto rank = [&](Index value) {
            if (!values) return static_cast<std::int32_t>(value - from);
            const Index *place = std::lower_bound(values.get(), values.get() + count, value);
            const bool found = place != values.get() + count && *place == value;
            return static_cast<std::int32_t>(found ? place - values.get() : -1);
        };
        of_queries_ = memory<std::int32_t>(size_of(q_, 1) * queries);
        const Index row = keys + SPARE;
        of_keys_ = memory<std::int32_t>(size_of(k_, 1) * row);
        if (!of_queries_ || !of_keys_) return error.refuse("not enough memory");
        each(q_, [&](Index item, Index i, Index value) { of_queries_[item * queries + i] = rank(value); });
        each(k_, [&](Index item, Index i, Index value) { of_keys_[item * row + i] = rank(value); });
        return true;
    }

    bool is_of(const char *name) const { return !std::strcmp(name + 2, name_); }

    View view(bool of_keys) const {
        const relskew_array &x = of_keys ? k_ : q_;
        const Index row = size_of(x, 0) + (of_keys ? SPARE : 0);
        return {of_keys ? of_keys_.get() : of_queries_.get(), 2, {size_of(x, 1), row}, {row, 1}};
    }

private:
    static Index at(const relskew_array &x, Index item, Index i) {
        const Index step = x.axes > 1 ? x.steps[0] : 0;
        return static_cast<const Index *>(x.data)[item * step + i * x.steps[x.axes - 1]];
    }

    template <class Visit>
    static void each(const relskew_array &x, Visit &&visit) {
        for (Index item = 0; item < size_of(x, 1); item++)
            for (Index i = 0; i < size_of(x, 0); i++) visit(item, i, at(x, item, i));
    }
};

// Reads the arrays of a call by the names that problem.hpp declares.
struct Reader {
    const relskew_call &call;
    const Labels &segments, &positions;
    Text &error;

    template <class T>
    bool operator()(const char *name, Array<T> &to, Need need, const Axes &axes) {
        if (need == Need::NOT) return true;
        View view{};
        if constexpr (std::is_same_v<T, const std::int32_t>) {
            const Labels &own = segments.is_of(name) ? segments : positions;
            if (!own.is_of(name) || !own) return true;
            view = own.view(*name == 'k');
        } else {
            const relskew_array *from = named(call, name);
            if (!from || !from->data) return need != Need::MUST || error.refuse("`%s` is missing", name);
            if (from->axes < 0 || from->axes > 4)
                return error.refuse("`%s` must have up to 4 axes, got %d", name, from->axes);
            view.at = from->data, view.count = from->axes;
            std::copy(from->sizes, from->sizes + 4, view.sizes), std::copy(from->steps, from->steps + 4, view.steps);
            const int last = view.count - 1;
            if (axes.column.kind != Axis::NONE && last >= 0 && view.sizes[last] > 1 && view.steps[last] != 1)
                return error.refuse("`%s` must be contiguous along its last axis", name);
            if (reinterpret_cast<std::uintptr_t>(view.at) % alignof(T))
                return error.refuse("`%s` must be aligned to its type", name);
        }
        const char *fault = place(view, axes, to);
        return !fault || error.refuse("`%s` %s", name, fault);
    }
};

// The lowest and the highest relative position that some query sees; false if no query sees a key.
bool seen_positions(const Sizes &x, const Labels &labels, bool causal, Index &lowest, Index &highest) {
    if (labels) {
        lowest = std::max(labels.low, -x.before), highest = std::min(labels.high, x.after);
        return lowest <= highest;
    }
    const auto bounds = [&](Index p) {
        Seen own{p - x.before, std::min(FAR + p, p + x.after)};
        if (x.block) {
            own.low = std::max(own.low, floored(p, x.block) - x.behind * x.block);
            own.high = std::min(own.high, floored(p, x.block) + x.block - 1);
        }
        return own.within(0, x.keys - 1);
    };
    Index low = x.offset, high = x.offset + x.queries - 1;  // positions of the queries that see a key
    if (x.after < FAR) low = std::max(low, -x.after);
    if (x.before < FAR) high = std::min(high, x.keys - 1 + x.before);
    if (x.block) {
        low = std::max<Index>(low, 0);
        high = std::min(high, ((x.keys - 1) / x.block + 1 + x.behind) * x.block - 1);
    }
    if (low > high || x.keys == 0 || bounds(low).low > bounds(low).high) return false;
    lowest = bounds(high).low - high, highest = bounds(low).high - low;
    if (x.block) {  // a block's last query sees furthest back, and its first one furthest ahead
        const Index back = std::max(low, floored(high + 1, x.block) - 1);
        const Index ahead = std::min(high, floored(low + x.block - 1, x.block));
        lowest = std::min(lowest, bounds(back).low - back);
        highest = causal ? highest : std::max(highest, bounds(ahead).high - ahead);
    }
    return true;
}

bool reached(const relskew_call &call, const Sizes &x, const Labels &labels, bool causal, Text &error) {
    const char *const first = call.rel_k.data       ? "rel_k"
                              : call.rel_v.data     ? "rel_v"
                              : call.rel_bias.data  ? "rel_bias"
                              : call.key_table.data ? "key_table"
                                                    : nullptr;
    Index low = 0, high = 0;
    if (!first || call.beyond != RELSKEW_ERROR || !seen_positions(x, labels, causal, low, high)) return true;
    if (-low <= call.left && high <= call.right) return true;
    return error.refuse(
        "`%s` reaches relative positions %lld ... %lld, but this call needs %lld ... %lld: use a longer table, or "
        "set beyond to \"clip\" or \"zero\"",
        first, static_cast<long long>(-call.left), static_cast<long long>(call.right), static_cast<long long>(low),
        static_cast<long long>(high));
}

// Read the numbers of a call, as `_compiled/__init__.py` does in Python; return whether it is causal.
template <class Stored>
bool read_numbers(const relskew_call &call, ProblemOf<Stored> &x) {
    x.items = size_of(call.q, 3), x.heads = size_of(call.q, 2), x.queries = size_of(call.q, 1);
    x.key_heads = size_of(call.k, 2), x.keys = size_of(call.k, 1);
    x.width = size_of(call.q, 0), x.value_width = size_of(call.v, 0);
    x.rel_width = call.rel_k.data ? size_of(call.rel_k, 0) : 0;
    x.left = call.left, x.rows = call.left + call.right + 1, x.clip = call.beyond == RELSKEW_CLIP;
    const auto bound = [](Index side) { return side < 0 ? FAR : std::min(side, FAR); };
    const bool causal = call.causal || (call.block_size && call.blocks_before < 0);
    x.before = bound(call.window_left), x.after = causal ? 0 : bound(call.window_right);
    x.block = std::min(call.block_size, FAR);
    if (x.block > 0) {
        x.behind = std::min(call.blocks_before < 0 ? 1 : call.blocks_before, FAR / x.block);
        x.before = std::min(x.before, (x.behind + 1) * x.block - 1), x.after = std::min(x.after, x.block - 1);
    }
    using Real = typename ProblemOf<Stored>::Real;
    const double scale = std::isnan(call.scale) ? 1 / std::sqrt(static_cast<double>(x.width)) : call.scale;
    x.offset = call.offset, x.mask_adds = call.mask_adds != 0, x.kept = 1;
    x.in_int8 = call.k_scale.data || call.v_scale.data;
    x.scale = static_cast<Real>(scale);
    x.rel_scale = static_cast<Real>(std::isnan(call.rel_scale) ? scale : call.rel_scale);
    x.softcap = static_cast<Real>(call.softcap);
    return causal;
}

// Count the sinks in each row's softmax: one more logit, without a value.
template <class Stored>
void count_sinks(const ProblemOf<Stored> &x, const relskew_array &sinks) {
    using Real = typename ProblemOf<Stored>::Real;
    const Stored *const all = static_cast<const Stored *>(sinks.data);
    for (Index item = 0; item < x.items; item++)
        for (Index head = 0; head < x.heads; head++) {
            const Real sink = all[head * sinks.steps[0]];
            for (Index i = 0; i < x.queries && sink != -std::numeric_limits<Real>::infinity(); i++) {
                const Real *const sums = x.sums.of(item, head, i);
                const Real top = std::max(sums[0], sink), own = std::exp(sums[0] - top + sums[1]);
                const Real total = own + std::exp(sink - top);
                Stored *const row = x.out.of(item, head, i);
                for (Index c = 0; c < x.value_width; c++) row[c] = Stored(static_cast<Real>(row[c]) * (own / total));
                if (x.lse) *x.lse.of(item, head, i) = top + std::log(total);
            }
        }
}

template <class Stored>
bool attend(const relskew_call &call, const HostTeam &team, Text &error) {
    ProblemOf<Stored> x{};
    const bool causal = read_numbers(call, x);
    if (x.rows < 1) return error.refuse("`left` and `right` must describe a table with at least one row");
    if (call.block_size < 0) return error.refuse("`block_size` must not be negative");
    Labels segments(call.q_segments, call.k_segments, "segments");
    Labels positions(call.q_positions, call.k_positions, "positions");
    if (!segments.read(x.queries, x.keys, 0, error)) return false;
    if (!positions.read(x.queries, x.keys, std::max<Index>(1, x.block), error)) return false;
    if (x.is_too_large()) return error.refuse("the call is too large");
    Reader reader{call, segments, positions, error};
    if (!x.arrays(reader) || (x.in_int8 && !x.quantised(reader))) return false;
    if (!x.integers(reader) || !x.results(reader)) return false;
    if (call.sinks.data && (call.sinks.axes != 1 || call.sinks.sizes[0] != x.heads))
        return error.refuse("`sinks` must have a number for each head");
    if (x.items == 0 || x.heads == 0 || x.queries == 0 || x.value_width == 0) return true;
    if (const char *wrong = x.wrong()) return error.refuse("%s", wrong);
    if (!reached(call, x, positions, causal, error)) return false;
    Memory<typename ProblemOf<Stored>::Real> sums;
    if (call.sinks.data && !(sums = make_sums(x))) return error.refuse("not enough memory");
    x.narrow();
    Tasks tasks(x, static_cast<bool>(x.k_positions), grain_of_attend(x));
    const auto threads = [&team](void (*work)(void *), void *of, Index count) { team.run(team.of, work, of, count); };
    if (!tasks.make() || !run_tasks(chosen.of<Stored>().attend, x, tasks, threads, std::max<Index>(1, team.threads)))
        return error.refuse("not enough memory");
    if (call.sinks.data) count_sinks(x, call.sinks);
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
