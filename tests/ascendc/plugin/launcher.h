// How the stand-in for AscendC launches a kernel; in the place of kernels/ascendc/launch/cann/launcher.h.
#pragma once

#include "kernel_operator.h"

#include <deque>

#include "launch/arguments.h"

// Of host_device.cpp: tells the memory of all tensors on the device. Weak: drivers call kernels, not launchers, and have no device.
extern "C" __attribute__((weak)) void turbogr_test_memory(void (*tell)(void* to, void* begin, int64_t bytes), void* to);

namespace turbogr::test {

// Runs a kernel; what a guard throws goes through to the caller. Only tensors may be touched.
template <class Kernel>
uint32_t run(int64_t cores, Kernel kernel) {
    std::deque<host::Allocation> allocations;
    turbogr_test_memory(
        [](void* to, void* begin, int64_t bytes) {
            if (bytes > 0) static_cast<std::deque<host::Allocation>*>(to)->emplace_back(host::global(begin, bytes));
        },
        &allocations);
    host::launch(cores, kernel);
    return 0;
}

}  // namespace turbogr::test

#define TURBOGR_LAUNCH_ON(kernel, count, cores)                                                                          \
    extern "C" uint32_t turbogr_launch_##kernel(uint32_t blocks, void*, void* const* arguments) {                        \
        return turbogr::test::run(cores, [&] { kernel(TURBOGR_ARGUMENTS_##count(arguments)); });       \
    }

#define TURBOGR_LAUNCH_MIXED(kernel, count) TURBOGR_LAUNCH_ON(kernel, count, 2 * int64_t{blocks})
#define TURBOGR_LAUNCH_VECTOR(kernel, count) TURBOGR_LAUNCH_ON(kernel, count, int64_t{blocks})
