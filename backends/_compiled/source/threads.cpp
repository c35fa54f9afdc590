#include "threads.hpp"

#if defined(_WIN32)
#define WIN32_LEAN_AND_MEAN
#include <windows.h>
#else
#include <dlfcn.h>
#include <sched.h>
#include <time.h>
#include <unistd.h>
#endif

namespace {

// Let a new thread take turns, unless there is no memory for one.
#if defined(_WIN32)
DWORD WINAPI help(void *shared) { return Shared::help(shared), 0; }

bool start(Shared *shared) {
    const HANDLE thread = CreateThread(nullptr, 0, help, shared, 0, nullptr);
    return thread && CloseHandle(thread);
}
#else
void *help(void *shared) { return Shared::help(shared), nullptr; }

bool start(Shared *shared) {
    pthread_t thread;
    return !pthread_create(&thread, nullptr, help, shared) && !pthread_detach(thread);
}
#endif

// Keep this library loaded, even if the host closes it: a thread may begin after the end of its call. On other systems,
// the linker does it.
void stay_loaded() {
    [[maybe_unused]] static std::atomic<bool> stays{false};
#if defined(_WIN32)
    if (stays.exchange(true)) return;
    HMODULE own;
    GetModuleHandleExW(GET_MODULE_HANDLE_EX_FLAG_PIN | GET_MODULE_HANDLE_EX_FLAG_FROM_ADDRESS,
                       reinterpret_cast<const wchar_t *>(&stay_loaded), &own);
#elif defined(__APPLE__)
    if (stays.exchange(true)) return;
    Dl_info own;
    if (dladdr(reinterpret_cast<void *>(&stay_loaded), &own)) dlopen(own.dli_fname, RTLD_NOW | RTLD_NODELETE);
#endif
}

}  // namespace

void run_on_new_threads(void (*work)(void *), void *of, unsigned threads, unsigned) {
    stay_loaded();
    Shared::run(work, of, threads, start);
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
