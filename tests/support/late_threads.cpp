// A call whose other threads begin after its end, at which it takes its memory with it.
#include <cstdio>

#include "threads.hpp"

static int calls = 0, wrong = 0;

static void expect(bool right, const char *what) {
    if (!right) std::printf("%s, after %d calls\n", what, calls), wrong++;
}

static void work(void *of) { ++*static_cast<int *>(of); }

int main() {
    Shared *late = nullptr;
    int started = 0;
    Shared::run(work, &calls, 3, [&](Shared *shared) { return late = shared, ++started; });
    expect(started == 2 && calls == 3, "a call of three turns did not start two threads and take all turns");
    Shared::help(late), Shared::help(late);
    expect(calls == 3, "threads that began late did what was done");

    started = 0;
    Shared::run(work, &calls, 3, [&](Shared *) { return started++, false; });
    expect(started == 1 && calls == 6, "without threads, a call did not do it all");

    Shared::run(work, &calls, 3, [&](Shared *shared) { return Shared::help(shared), true; });
    expect(calls == 9, "threads that began at once did not take the turns");

    run_on_new_threads([](void *) {}, nullptr, 8, 0);
    return wrong;
}
