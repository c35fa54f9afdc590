#include "tasks.hpp"

#include <cmath>
#include <new>

namespace {

constexpr double WANTED = 512;   // tasks of a call, if it is large enough: many, for many processors and an even finish
constexpr double MOST = 0x1p28;  // multiplications of a task: some milliseconds
constexpr double PATIENCE = 0.05;  // seconds between two checks whether to continue
constexpr Index STEP = 64;         // keys between possible cuts of a group: whole panels of all kinds of vectors
constexpr double NEAR = 1 / 16.;   // of a task: a cut this near to the end of a group is moved there

}  // namespace

// Count the pairs of queries and keys up to the end of each group of a head.
Index Tasks::count_pairs() {
    groups_ = (x_.queries + grain_.queries - 1) / grain_.queries;
    Index total = 0;
    for (Index group = 0; group < groups_; group++) ends_[group] = total += pairs(group, 0, x_.keys);
    return total;
}

bool Tasks::make() {
    units_ = x_.items * units_of_item();
    ends_ = memory<Index>((x_.queries - 1) / grain_.queries + 1);
    if (!ends_) return false;
    const double pairs = static_cast<double>(count_pairs());
    const double cost = grain_.cost * pairs * static_cast<double>(std::min(grain_.heads, x_.heads));
    const double wanted = std::max(WANTED / static_cast<double>(units_), cost / MOST);
    each_ = std::max<Index>(1, static_cast<Index>(std::min(cost / grain_.least, wanted)));
    const double side = std::sqrt(pairs / static_cast<double>(each_)) / static_cast<double>(grain_.queries);
    if (grain_.square && side >= 2) grain_.queries *= static_cast<Index>(side), count_pairs();
    for (Index number = 0; number < each_; number++) {
        const Task own = task(number);
        const Seen keys = this->keys(own), queries = this->queries(own);
        is_cut_ = is_cut_ || own.from.key;
        most_keys_ = std::max(most_keys_, keys.high - keys.low);
        most_queries_ = std::max(most_queries_, queries.high - queries.low);
    }
    done_ = memory<std::atomic<bool>>(count());
    for (Index i = 0; done_ && i < count(); i++) new (&done_[i]) std::atomic<bool>(false);
    return static_cast<bool>(done_);
}

bool Tasks::take(Task &task) {
    if (go_on_ && caller_ == this_thread() && now() > asked_ + PATIENCE) {
        if (!go_on_(of_)) give_up();
        asked_ = now();
    }
    const Index number = given_up_ ? count() : next_++;
    if (number >= count()) return false;
    task = this->task(number);
    return true;
}

bool Tasks::wait(const Task &task) const {
    while (task.number && !done_[task.number - 1].load(std::memory_order_acquire) && !given_up_) yield_thread();
    return !given_up_;
}

Task Tasks::task(Index number) const {
    const Index unit = number / each_, own = number % each_, item = unit / units_of_item();
    const Index head = unit % units_of_item() * grain_.heads;
    return {number, item, head, place(own), place(own + 1), own == 0 && head % x_.group() == 0};
}

Seen Tasks::seen(Index first, Index end) const {
    if (anywhere_) return {0, x_.keys};
    return Seen::positions(x_, x_.offset + first, x_.offset + end - 1).within(0, x_.keys);
}

// Return the number of pairs of a group's queries and the keys low … high - 1, counted by whole blocks.
Index Tasks::pairs(Index group, Index low, Index high) const {
    Index total = 0;
    const Index end = std::min(x_.queries, (group + 1) * grain_.queries);
    for (Index first = group * grain_.queries; first < end; first += BLOCK) {
        const Index stop = std::min(end, first + BLOCK);
        const Seen own = seen(first, stop).within(low, high);
        total += (stop - first) * std::max<Index>(0, own.high - own.low);
    }
    return total;
}

// Return where a task begins, by its number within a head.
Place Tasks::place(Index number) const {
    if (number == 0) return {0, 0};
    if (number == each_) return {groups_, 0};
    const double part = static_cast<double>(ends_[groups_ - 1]) / static_cast<double>(each_);
    const double pairs = part * static_cast<double>(number);
    const Index *const all = ends_.get();
    const Index group = std::upper_bound(all, all + groups_, static_cast<Index>(pairs)) - all;
    if (group == groups_) return {groups_, 0};
    const Index start = group ? all[group - 1] : 0;
    const double before = pairs - static_cast<double>(start), after = static_cast<double>(all[group]) - pairs;
    if (before < NEAR * part) return {group, 0};
    if (after < NEAR * part) return {group + 1, 0};
    // bounds of the cut, in steps of keys: too few pairs come before the first, and enough before the second
    Index low = 0, high = x_.keys / STEP + 1;
    while (high - low > 1) {
        const Index middle = (low + high) / 2;
        (static_cast<double>(this->pairs(group, 0, middle * STEP)) < before ? low : high) = middle;
    }
    const Index under = this->pairs(group, 0, low * STEP), over = this->pairs(group, 0, high * STEP);
    const bool is_nearer = static_cast<double>(over) - before < before - static_cast<double>(under);
    const Index cut = (is_nearer ? high : low) * STEP, there = is_nearer ? over : under;
    if (there == 0) return {group, 0};
    return there == all[group] - start ? Place{group + 1, 0} : Place{group, cut};
}

Task::Piece Tasks::piece(const Task &task, Index group) const {
    const Index first = group * grain_.queries;
    const bool goes_on = group == task.from.group && task.from.key;
    return {first, std::min(x_.queries, first + grain_.queries), goes_on ? task.from.key : 0,
            group == task.to.group ? task.to.key : x_.keys, goes_on};
}

Seen Tasks::queries(const Task &task) const {
    const Index end = task.to.group + (task.to.key > 0);
    return {task.from.group * grain_.queries, std::min(x_.queries, end * grain_.queries)};
}

Seen Tasks::keys(const Task &task) const {
    Seen found{x_.keys, 0};
    task.groups([&](Index group) {
        const Task::Piece own = piece(task, group);
        const Seen there = seen(own.first, own.end).within(own.low, own.high);
        if (!there.none()) found = {std::min(found.low, there.low), std::max(found.high, there.high)};
    });
    return found.none() ? Seen{0, 0} : found;
}

Index Tasks::pairs(const Task &task) const {
    Index total = 0;
    task.groups([&](Index group) {
        const Task::Piece own = piece(task, group);
        total += pairs(group, own.low, own.high);
    });
    return total;
}
