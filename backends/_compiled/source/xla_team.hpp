// Run a function on the threads of XLA's pool.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <new>

#include "problem.hpp"
#include "threads.hpp"
#include "xla_interface.hpp"

namespace xla {

// The turns of one piece of work, which several threads take one after the other. The caller takes turns too, and only
// waits for turns that another thread has begun, so busy threads of the pool, which may be waiting in the same way,
// delay no one.
class Team {
public:
    using Work = void (*)(void *);

    static void run(const Frame *frame, Work work, void *of, Index count) {
        void *place = std::malloc(sizeof(Team));
        if (!place) return work(of);
        Team *team = new (place) Team(work, of, count);
        for (Index i = 1; i < count; i++) {
            Task args{sizeof(Task), nullptr, frame->context, help, team};
            team->users++;
            if (Error *error = frame->offers->schedule(&args)) {
                destroy(frame, error), team->users--;
                break;
            }
        }
        team->take_turns();
        team->turns.wait();
        team->leave();
    }

    static Index workers(const Frame *frame) {
        Index count = 1;
        Threads args{sizeof(Threads), nullptr, frame->context, &count};
        Error *error = frame->offers->count_threads(&args);
        if (error) destroy(frame, error);
        return error ? 1 : std::max<Index>(1, count);
    }

private:
    const Work work;
    void *const of;  // the caller's memory, which is gone when all turns are over
    const Index count;
    std::atomic<Index> next{0}, users{1};
    Turns turns;

    Team(Work work, void *of, Index count) : work(work), of(of), count(count), turns(count) {}

    static void destroy(const Frame *frame, Error *error) {
        OldError args{sizeof(OldError), nullptr, error};
        frame->offers->destroy_error(&args);
    }

    static void help(void *team) { static_cast<Team *>(team)->take_turns(), static_cast<Team *>(team)->leave(); }

    void take_turns() {
        while (next++ < count) {
            work(of);
            turns.finish_one();
        }
    }

    void leave() {
        if (--users) return;
        this->~Team();
        std::free(this);
    }
};

}  // namespace xla
