// Parts of a call, and the threads that work on them.
#pragma once

#include <atomic>

#include "problem.hpp"

// Run a function on so many threads of a team, this one among them: `GOMP_parallel`, which OpenMP's libraries have.
using Team = void (*)(void (*)(void *), void *, unsigned threads, unsigned flags);

// The parts `first … stop - 1` of a call: whoever works on them takes the next one.
template <class Real>
class Parts {
public:
    Parts(Kernel<Real> kernel, const ProblemOf<Real> &x, Index first, Index stop, Index all)
        : kernel_(kernel), x_(x), stop_(stop), all_(all), next_(first) {}

    // Return once all are done; false if there was no memory.
    bool run(Team team, unsigned threads) {
        if (team && threads > 1 && stop_ - next_ > 1)
            team([](void *parts) { static_cast<Parts *>(parts)->work_off(); }, this, threads, 0);
        else
            work_off();
        return !failed_;
    }

    void work_off() {
        for (Index part; !failed_ && (part = next_++) < stop_;)
            if (!kernel_(x_, part, all_)) failed_ = true;
    }

private:
    const Kernel<Real> kernel_;
    const ProblemOf<Real> &x_;
    const Index stop_, all_;
    std::atomic<Index> next_;
    std::atomic<bool> failed_{false};
};
