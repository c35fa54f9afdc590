// The threads, the clock and the processors of the system: of POSIX, or of Windows.
#pragma once

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <new>

#if !defined(_WIN32)
#include <pthread.h>
#endif

std::uintptr_t this_thread();  // a number that no other running thread has
void yield_thread();           // let other threads run
double now();                  // seconds of a clock that never goes back
int count_processors();

// Run a function on a number of threads: on this one, and on new ones.
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

// Calls of a function, which threads take in turns.
class Shared {
public:
    using Work = void (*)(void *);

    // Call `work(of)` a number of times. This thread takes turns, too, and only waits for those that another thread has
    // begun: threads that begin late, because the processors are busy, delay no one. `start(shared)` lets another
    // thread call `help(shared)`; false if there is none.
    template <class Start>
    static void run(Work work, void *of, std::int64_t count, Start &&start) {
        void *const place = std::malloc(sizeof(Shared));
        if (!place) return work(of);
        auto *const shared = new (place) Shared(work, of, count);
        for (bool more = true; more && --count;) {
            shared->users_++;
            more = start(shared);
            if (!more) shared->users_--;
        }
        shared->take_turns();
        shared->turns_.wait();
        shared->leave();
    }

    static void help(void *shared) {
        static_cast<Shared *>(shared)->take_turns();
        static_cast<Shared *>(shared)->leave();
    }

private:
    const Work work_;
    void *const of_;  // memory of the caller, which is gone when all turns are over
    const std::int64_t count_;
    std::atomic<std::int64_t> next_{0}, users_{1};
    Turns turns_;

    Shared(Work work, void *of, std::int64_t count) : work_(work), of_(of), count_(count), turns_(count) {}

    void take_turns() {
        while (next_++ < count_) work_(of_), turns_.finish_one();
    }

    void leave() {
        if (--users_) return;
        this->~Shared();
        std::free(this);
    }
};
