// Calls from hosts without Python: the structs of relskew.h, checked, on the host's threads.
#pragma once

#include <cstdarg>
#include <cstdio>

#include "../include/relskew.h"
#include "tasks.hpp"

// The error message; only the first one is kept.
class Text {
public:
    Text(char *at, std::size_t length) : at_(at), length_(length) {
        if (length_) *at_ = '\0';
    }

    __attribute__((format(printf, 2, 3))) bool refuse(const char *format, ...) {
        if (wrong_) return false;
        wrong_ = true;
        std::va_list values;
        va_start(values, format);
        if (length_) std::vsnprintf(at_, length_, format, values);
        va_end(values);
        return false;
    }

private:
    char *at_;
    std::size_t length_;
    bool wrong_ = false;
};

// Threads that run a function `count` times, or fewer times if there are fewer threads.
struct HostTeam {
    void (*run)(void *of, void (*work)(void *), void *with, Index count);
    void *of;
    Index threads;
};

// Compute a call; false if an argument is wrong.
bool attend_for_host(const relskew_call &call, const HostTeam &team, Text &error);
