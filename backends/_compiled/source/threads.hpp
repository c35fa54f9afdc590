// The threads, the clock and the processors of the system: of POSIX, or of Windows.
#pragma once

#include <cstdint>

#if !defined(_WIN32)
#include <pthread.h>
#endif

std::uintptr_t this_thread();  // a number that no other running thread has
void yield_thread();           // let other threads run
double now();                  // seconds of a clock that never goes back
int count_processors();

// Run a function on a number of threads: on this one, and on new ones, which end afterwards.
void run_on_new_threads(void (*work)(void *), void *of, unsigned threads, unsigned flags);

// A number of turns; one thread waits until the others have finished all of them.
class Turns {
public:
    explicit Turns(std::int64_t count) : left_(count) {}
    ~Turns();
    Turns(const Turns &) = delete;
    Turns &operator=(const Turns &) = delete;

    void finish_one();
    void wait();

private:
    std::int64_t left_;
#if defined(_WIN32)
    void *lock_ = nullptr, *all_ = nullptr;  // an SRWLOCK and a CONDITION_VARIABLE, which are pointers
#else
    pthread_mutex_t lock_ = PTHREAD_MUTEX_INITIALIZER;
    pthread_cond_t all_ = PTHREAD_COND_INITIALIZER;
#endif
};
