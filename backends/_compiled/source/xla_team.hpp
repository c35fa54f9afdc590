// Run a function on the threads of XLA's pool.
#pragma once

#include <algorithm>

#include "problem.hpp"
#include "threads.hpp"
#include "xla_interface.hpp"

namespace xla {

inline void destroy(const Frame *frame, Error *error) {
    OldError args{sizeof(OldError), nullptr, error};
    frame->offers->destroy_error(&args);
}

// The busy threads of the pool may be waiting for turns in the same way.
inline void run_on_pool(const Frame *frame, Shared::Work work, void *of, Index count) {
    Shared::run(work, of, count, [frame](Shared *shared) {
        PoolTask args{sizeof(PoolTask), nullptr, frame->context, Shared::help, shared};
        Error *error = frame->offers->schedule(&args);
        if (error) destroy(frame, error);
        return !error;
    });
}

inline Index threads_of_pool(const Frame *frame) {
    Index count = 1;
    Threads args{sizeof(Threads), nullptr, frame->context, &count};
    Error *error = frame->offers->count_threads(&args);
    if (error) destroy(frame, error);
    return error ? 1 : std::max<Index>(1, count);
}

}  // namespace xla
