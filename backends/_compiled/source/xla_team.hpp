// Tasks on the threads of XLA's own pool.
#pragma once

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <new>

#include "../third_party/xla/ffi/api/c_api.h"
#include "problem.hpp"

namespace xla {

using Frame = XLA_FFI_CallFrame;
using Error = XLA_FFI_Error;

// Tasks 0 … count - 1, which some threads take one after the other. The caller works too, and waits only for tasks that
// another thread has begun: threads of the pool that are busy, maybe with waiting like this one, keep nobody up.
class Team {
public:
    using Task = bool (*)(void *, Index);

    static bool run(const Frame *frame, Task task, void *of, Index count, Index workers) {
        bool done = true;
        void *place = workers > 1 && count > 1 ? std::malloc(sizeof(Team)) : nullptr;
        if (!place) {
            for (Index i = 0; i < count; i++) done = task(of, i) && done;
            return done;
        }
        Team *team = new (place) Team(task, of, count);
        for (Index i = 1; i < std::min(workers, count); i++) {
            XLA_FFI_ThreadPool_Schedule_Args args{XLA_FFI_ThreadPool_Schedule_Args_STRUCT_SIZE, nullptr, frame->ctx,
                                                  help, team};
            team->users++;
            if (Error *error = frame->api->XLA_FFI_ThreadPool_Schedule(&args)) {
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
        XLA_FFI_ThreadPool_NumThreads_Args args{XLA_FFI_ThreadPool_NumThreads_Args_STRUCT_SIZE, nullptr, frame->ctx,
                                                &count};
        Error *error = frame->api->XLA_FFI_ThreadPool_NumThreads(&args);
        if (error) destroy(frame, error);
        return error ? 1 : std::max<Index>(1, count);
    }

private:
    const Task task;
    void *const of;  // the caller's, who is gone when all tasks are done
    const Index count;
    std::atomic<Index> next{0}, users{1};
    std::atomic<bool> failed{false};
    Index finished = 0;
    pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    pthread_cond_t all = PTHREAD_COND_INITIALIZER;

    Team(Task task, void *of, Index count) : task(task), of(of), count(count) {}

    ~Team() { pthread_cond_destroy(&all), pthread_mutex_destroy(&lock); }

    static void destroy(const Frame *frame, Error *error) {
        XLA_FFI_Error_Destroy_Args args{XLA_FFI_Error_Destroy_Args_STRUCT_SIZE, nullptr, error};
        frame->api->XLA_FFI_Error_Destroy(&args);
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
