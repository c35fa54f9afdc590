// Tasks on the threads of XLA's own pool.
#pragma once

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <new>

#include "problem.hpp"
#include "xla_interface.hpp"

namespace xla {

// Tasks 0 … count - 1, which some threads take one after the other. The caller works too, and waits only for tasks that
// another thread has begun: threads of the pool that are busy, maybe with waiting like this one, keep nobody up.
class Team {
public:
    using Work = bool (*)(void *, Index);

    static bool run(const Frame *frame, Work task, void *of, Index count, Index workers) {
        bool done = true;
        void *place = workers > 1 && count > 1 ? std::malloc(sizeof(Team)) : nullptr;
        if (!place) {
            for (Index i = 0; i < count; i++) done = task(of, i) && done;
            return done;
        }
        Team *team = new (place) Team(task, of, count);
        for (Index i = 1; i < std::min(workers, count); i++) {
            Task args{sizeof(Task), nullptr, frame->context, help, team};
            team->users++;
            if (Error *error = frame->offers->schedule(&args)) {
                destroy(frame, error), team->users--;
                break;
            }
        }
        team->work();
        pthread_mutex_lock(&team->lock);
        while (team->finished < count) pthread_cond_wait(&team->all, &team->lock);
        pthread_mutex_unlock(&team->lock);
        done = !team->failed;
        team->leave();
        return done;
    }

    static Index workers(const Frame *frame) {
        Index count = 1;
        Threads args{sizeof(Threads), nullptr, frame->context, &count};
        Error *error = frame->offers->count_threads(&args);
        if (error) destroy(frame, error);
        return error ? 1 : std::max<Index>(1, count);
    }

private:
    const Work task;
    void *const of;  // the caller's, who is gone when all tasks are done
    const Index count;
    std::atomic<Index> next{0}, users{1};
    std::atomic<bool> failed{false};
    Index finished = 0;
    pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    pthread_cond_t all = PTHREAD_COND_INITIALIZER;

    Team(Work task, void *of, Index count) : task(task), of(of), count(count) {}

    ~Team() { pthread_cond_destroy(&all), pthread_mutex_destroy(&lock); }

    static void destroy(const Frame *frame, Error *error) {
        OldError args{sizeof(OldError), nullptr, error};
        frame->offers->destroy_error(&args);
    }

    static void help(void *team) { static_cast<Team *>(team)->work(), static_cast<Team *>(team)->leave(); }

    void work() {
        for (Index i; (i = next++) < count;) {
            if (!task(of, i)) failed = true;
            pthread_mutex_lock(&lock);
            if (++finished == count) pthread_cond_signal(&all);
            pthread_mutex_unlock(&lock);
        }
    }

    void leave() {
        if (--users) return;
        this->~Team();
        std::free(this);
    }
};

}  // namespace xla
