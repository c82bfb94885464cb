// What a driver needs to be called from Python: `extern "C" void name(..., host::Outcome* outcome)`, with numbers as int64_t
// and double and tensors as pointers, runs its launch inside `host::report`. See tests/ascendc/build.py.
#pragma once

#include <cstring>
#include <exception>

#include "launch.h"

namespace host {

struct Outcome {
    Counters counters;
    char error[1024];
};

// Runs `body`, which returns Counters, and tells Python what came of it.
template <class Body>
void report(Outcome* outcome, Body body) {
    *outcome = Outcome{};
    try {
        outcome->counters = body();
    } catch (const std::exception& error) {
        std::strncpy(outcome->error, error.what(), sizeof outcome->error - 1);
    }
}

}  // namespace host

extern "C" {
__attribute__((used, weak)) const char* host_counter_names() { return host::COUNTER_NAMES; }
}
