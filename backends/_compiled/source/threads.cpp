#include "threads.hpp"

#include <cstdlib>

#if defined(_WIN32)
#define WIN32_LEAN_AND_MEAN
#include <windows.h>
#else
#include <sched.h>
#include <time.h>
#include <unistd.h>
#endif

namespace {

struct Started {
    void (*work)(void *);
    void *of;

#if defined(_WIN32)
    using Thread = HANDLE;

    static DWORD WINAPI run(void *own) { return static_cast<Started *>(own)->work(static_cast<Started *>(own)->of), 0; }

    bool start(Thread &thread) { return (thread = CreateThread(nullptr, 0, run, this, 0, nullptr)) != nullptr; }

    static void join(Thread thread) { WaitForSingleObject(thread, INFINITE), CloseHandle(thread); }
#else
    using Thread = pthread_t;

    static void *run(void *own) { return static_cast<Started *>(own)->work(static_cast<Started *>(own)->of), nullptr; }

    bool start(Thread &thread) { return !pthread_create(&thread, nullptr, run, this); }

    static void join(Thread thread) { pthread_join(thread, nullptr); }
#endif
};

}  // namespace

void run_on_new_threads(void (*work)(void *), void *of, unsigned threads, unsigned) {
    Started own{work, of};
    auto *const others = static_cast<Started::Thread *>(std::malloc(threads * sizeof(Started::Thread)));
    unsigned count = 0;  // if no more threads can be started, these do all the work
    while (others && count + 1 < threads && own.start(others[count])) count++;
    work(of);
    while (count) Started::join(others[--count]);
    std::free(others);
}

#if defined(_WIN32)

std::uintptr_t this_thread() { return GetCurrentThreadId(); }

void yield_thread() { SwitchToThread(); }

double now() {
    LARGE_INTEGER ticks, per_second;
    QueryPerformanceCounter(&ticks), QueryPerformanceFrequency(&per_second);
    return static_cast<double>(ticks.QuadPart) / static_cast<double>(per_second.QuadPart);
}

int count_processors() { return static_cast<int>(GetActiveProcessorCount(ALL_PROCESSOR_GROUPS)); }

Turns::~Turns() = default;

void Turns::finish_one() {
    AcquireSRWLockExclusive(reinterpret_cast<SRWLOCK *>(&lock_));
    if (!--left_) WakeConditionVariable(reinterpret_cast<CONDITION_VARIABLE *>(&all_));
    ReleaseSRWLockExclusive(reinterpret_cast<SRWLOCK *>(&lock_));
}

void Turns::wait() {
    auto *const lock = reinterpret_cast<SRWLOCK *>(&lock_);
    AcquireSRWLockExclusive(lock);
    while (left_) SleepConditionVariableSRW(reinterpret_cast<CONDITION_VARIABLE *>(&all_), lock, INFINITE, 0);
    ReleaseSRWLockExclusive(lock);
}

#else

std::uintptr_t this_thread() { return (std::uintptr_t)pthread_self(); }  // a number or a pointer

void yield_thread() { sched_yield(); }

double now() {
    timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

int count_processors() { return static_cast<int>(sysconf(_SC_NPROCESSORS_ONLN)); }

Turns::~Turns() { pthread_cond_destroy(&all_), pthread_mutex_destroy(&lock_); }

void Turns::finish_one() {
    pthread_mutex_lock(&lock_);
    if (!--left_) pthread_cond_signal(&all_);
    pthread_mutex_unlock(&lock_);
}

void Turns::wait() {
    pthread_mutex_lock(&lock_);
    while (left_) pthread_cond_wait(&all_, &lock_);
    pthread_mutex_unlock(&lock_);
}

#endif
