// How a call is cut into tasks, and the threads that run them.
//
// The cut depends only on the sizes of a call, and contributions to the same sums are added in the order of the tasks:
// results are identical to the bit for any number of threads.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>

#include "problem.hpp"
#include "threads.hpp"

#if defined(POISON)
#include <sanitizer/asan_interface.h>
#endif

constexpr Index ROWS = 2 * BLOCK;  // most queries of a block
constexpr Index ALONE = 64;        // up to this many queries form one block, if none of them sees less than the others
constexpr Index FEW = 4;           // up to this many queries, packing does not pay
constexpr Index TOGETHER = 8;      // heads that use the rows of a table at the same time, if there are few queries

inline Index floored(Index n, Index to) { return (n >= 0 ? n : n - to + 1) / to * to; }

// Queries of a block. Smaller blocks skip more of the future. But with a table for the keys, each block multiplies rows
// of it that are not needed, the same number for every block of queries. And a second block of only a few queries would
// go through all keys, and their gradients, again: windows have 49.
template <class Stored>
static Index rows_of_blocks(const ProblemOf<Stored> &x) {
    const bool alone = x.queries <= ALONE && x.after >= x.queries && !x.block;
    return x.key_table || alone ? ROWS : ROWS / 2;
}

constexpr Index LINE =
    64;  // bytes of a cache line: vectors and tiles that cross lines are read at a third of the speed

struct Free {
    Index before = 0;  // bytes between the allocated address and the aligned one
    void operator()(void *p) const { std::free(static_cast<char *>(p) - before); }
};
template <class T>
using Memory = std::unique_ptr<T[], Free>;

// Memory that begins with a cache line, or null if there is none: sizes have 64 bits on every machine, addresses only
// 32 on some.
template <class T>
static Memory<T> memory(Index count, bool zeros = true) {
    if (count > (PTRDIFF_MAX - LINE) / static_cast<Index>(sizeof(T))) return nullptr;
    const auto bytes = static_cast<std::size_t>(count * static_cast<Index>(sizeof(T)) + LINE);
    char *const own = static_cast<char *>(zeros ? std::calloc(bytes, 1) : std::malloc(bytes));
    if (!own) return nullptr;
    const Index before = LINE - static_cast<Index>(reinterpret_cast<std::uintptr_t>(own) % LINE);
#if defined(POISON)  // address sanitizers report what is read around the array
    const Index used = before + count * static_cast<Index>(sizeof(T));
    ASAN_POISON_MEMORY_REGION(own, static_cast<std::size_t>(before));
    ASAN_POISON_MEMORY_REGION(own + used, bytes - static_cast<std::size_t>(used));
#endif
    return Memory<T>(reinterpret_cast<T *>(own + before), Free{before});
}

// The keys that some queries of an item see.
struct Seen {
    Index low, high;

    // The positions that they see, whether or not there are keys, as `_positions/visibility.py` specifies it.
    static Seen positions(const Sizes &x, Index first_position, Index last_position) {
        Index low = first_position - x.before, high = last_position + x.after + 1;
        if (x.block) {
            low = std::max(low, floored(first_position, x.block) - x.behind * x.block);
            high = std::min(high, floored(last_position, x.block) + x.block);
        }
        return {low, high};
    }

    template <class Stored>
    static Seen of(const ProblemOf<Stored> &x, Index first_position, Index last_position) {
        if (x.k_positions) return {0, x.keys};
        return positions(x, first_position, last_position).within(0, x.keys);
    }

    Seen within(Index from, Index to) const { return {std::max(from, low), std::min(to, high)}; }
    bool none() const { return low >= high; }
};

// A place in the work of a head: after all groups of queries before this one, and after the pairs of this group with
// keys before `key`.
struct Place {
    Index group, key;
};

// The work between two places, for some heads of an item, which process their keys in the same order.
struct Task {
    Index number, item, head;
    Place from, to;
    bool begins;  // whether no earlier task has the same keys and values

    // Visit its groups; the one that continues earlier tasks comes last, when they should be done.
    template <class Visit>
    void groups(Visit &&visit) const {
        const Index end = to.group + (to.key > 0);
        for (Index group = from.group + (from.key > 0); group < end; group++) visit(group);
        if (from.key) visit(from.group);
    }

    // The queries of a group that belong to a task, and the keys.
    struct Piece {
        Index first, end, low, high;
        bool goes_on;  // whether earlier tasks have other keys of these queries
    };
};

// How fine the cut is.
struct Grain {
    Index queries;  // of a group
    Index heads;    // of a task
    double cost;    // of a pair of a query and a key, in multiplications
    double least;   // of the smallest worthwhile task
    bool sums;      // whether tasks add to the same sums
    bool square;    // whether a task also has a cost for each key, so that large tasks should have more queries
};

// Run a function on a number of threads, including this one, as `GOMP_parallel` of OpenMP's libraries does.
using Team = void (*)(void (*)(void *), void *, unsigned threads, unsigned flags);

// The tasks of a call; each thread takes the next one.
class Tasks {
public:
    Tasks(const Sizes &x, bool anywhere, Grain grain) : x_(x), anywhere_(anywhere), grain_(grain) {}

    // Cut the call; false if there is no memory.
    bool make();

    Index count() const { return units_ * each_; }
    Index of_a_head() const { return each_; }
    Index heads() const { return grain_.heads; }  // of a task, at most
    bool share_sums() const { return grain_.sums || each_ > 1 || x_.group() > 1; }
    bool is_cut() const { return is_cut_; }  // whether several tasks have the same queries
    Index most_keys() const { return most_keys_; }
    Index most_queries() const { return most_queries_; }
    Index most_queries_of_a_group() const { return std::min(x_.queries, grain_.queries); }

    // Ask regularly, in the thread that calls this, whether to continue.
    void ask(bool (*go_on)(void *), void *of) { go_on_ = go_on, of_ = of, asked_ = now(), caller_ = this_thread(); }

    // Take the next task; false if there is none, or the call was cancelled.
    bool take(Task &task);

    // Wait until the tasks before this one are done; false if the call was cancelled.
    bool wait(const Task &task) const;

    void finish(const Task &task) { done_[task.number].store(true, std::memory_order_release); }
    bool are_left() const { return next_ < count() && !given_up_; }
    void give_up() { given_up_ = true; }
    bool given_up() const { return given_up_; }

    Task task(Index number) const;
    Task::Piece piece(const Task &task, Index group) const;
    Seen keys(const Task &task) const;     // the keys that its queries see
    Index pairs(const Task &task) const;   // of queries and keys
    Seen queries(const Task &task) const;  // of its groups

private:
    const Sizes x_;
    const bool anywhere_;
    Grain grain_;
    Index groups_ = 0, units_ = 0, each_ = 1, most_keys_ = 0, most_queries_ = 0;
    bool is_cut_ = false;
    Memory<Index> ends_;  // the number of pairs up to the end of each group
    Memory<std::atomic<bool>> done_;
    std::atomic<Index> next_{0};
    std::atomic<bool> given_up_{false};
    bool (*go_on_)(void *) = nullptr;
    void *of_ = nullptr;
    double asked_ = 0;
    std::uintptr_t caller_ = 0;

    Index count_pairs();
    Index units_of_item() const { return (x_.heads + grain_.heads - 1) / grain_.heads; }
    Seen seen(Index first, Index end) const;
    Index pairs(Index group, Index low, Index high) const;
    Place place(Index number) const;
};

// Functions of the library that the module calls, where it is linked with the library.
#define EXPORTED __attribute__((visibility("default")))

// Process tasks of a call with the memory of one thread; false if there is no memory.
template <class Stored>
using Kernel = bool (*)(const ProblemOf<Stored> &, Tasks &);

// Where a pass with few queries is cut: between blocks of keys, for all heads that use the same rows of a table.
template <class Stored>
bool is_few(const ProblemOf<Stored> &x) {
    return x.queries <= FEW && !x.k_positions && !x.k_segments && !x.on_grids();
}

template <class Stored>
double multiplications(const ProblemOf<Stored> &x) {
    const Index of_logits = x.width + (x.has_rel_k() ? x.rel_width : 0) + (x.key_table ? x.width : 0);
    return static_cast<double>(of_logits + x.value_width * (x.has_rel_v() ? 2 : 1));
}

template <class Stored>
Grain grain_of_attend(const ProblemOf<Stored> &x) {
    const Index runs = (x.heads + TOGETHER - 1) / TOGETHER, together = (x.heads + runs - 1) / runs;
    if (is_few(x)) return {FEW, together, multiplications(x), 0x1p19, false, false};
    return {rows_of_blocks(x), 1, multiplications(x), 0x1p23, false, false};
}

template <class Stored>
Grain grain_of_pull_back(const ProblemOf<Stored> &x) {
    const bool sums = x.rel_k || x.rel_v || x.rel_bias || x.key_table || x.axis_tables || x.d_added;
    return {3 * rows_of_blocks(x), 1, 2.5 * multiplications(x), 0x1.8p25, sums, true};
}

// Give a call memory for two numbers of each query, or null if there is none.
template <class Stored>
Memory<typename ProblemOf<Stored>::Real> make_sums(ProblemOf<Stored> &x) {
    x.sums.row = 2, x.sums.head = 2 * x.queries, x.sums.item = x.heads * x.sums.head;
    auto own = memory<typename ProblemOf<Stored>::Real>(x.items * x.sums.item);
    x.sums.at = own.get();
    return own;
}

// Run a call that has been cut on the threads of a team; false if there was no memory, or it was cancelled.
template <class Stored, class OnThreads>
bool run_tasks(Kernel<Stored> kernel, const ProblemOf<Stored> &given, Tasks &tasks, OnThreads team, Index threads) {
    struct Work {
        Kernel<Stored> kernel;
        ProblemOf<Stored> x;
        Tasks &tasks;

        static void run(void *of) {
            Work &own = *static_cast<Work *>(of);
            if (own.tasks.are_left() && !own.kernel(own.x, own.tasks)) own.tasks.give_up();
        }
    } work{kernel, given, tasks};
    Memory<typename ProblemOf<Stored>::Real> sums;  // they combine the results of several tasks
    if (tasks.is_cut() && given.out && !given.sums && !(sums = make_sums(work.x))) return false;
    threads = std::min(threads, tasks.count());
    if (threads > 1)
        team(Work::run, &work, threads);
    else
        Work::run(&work);
    return !tasks.given_up();
}
