// How the stand-in for AscendC launches a kernel; in the place of kernels/ascendc/launch/cann/launcher.h.
#pragma once

#include "kernel_operator.h"

#include <deque>
#include <set>

#include "launch/arguments.h"

// Of host_device.cpp: the memory of the device that an address belongs to.
extern "C" void turbogr_test_memory(const void* address, void** begin, int64_t* bytes);

namespace turbogr::test {

// Runs a kernel; what a guard throws goes through to the caller. Only memory of the arguments may be touched.
template <class Kernel>
uint32_t run(int64_t cores, int count, void* const* arguments, Kernel kernel) {
    std::set<void*> known;
    std::deque<host::Allocation> allocations;
    for (int i = 0; i < count; i++) {
        void* begin = nullptr;
        int64_t bytes = 0;
        if (arguments[i] == nullptr) continue;
        turbogr_test_memory(arguments[i], &begin, &bytes);
        if (begin != nullptr && known.insert(begin).second) allocations.emplace_back(host::global(begin, bytes));
    }
    host::launch(cores, kernel);
    return 0;
}

}  // namespace turbogr::test

#define TURBOGR_LAUNCH_ON(kernel, count, cores)                                                                          \
    extern "C" uint32_t turbogr_launch_##kernel(uint32_t blocks, void*, void* const* arguments) {                        \
        return turbogr::test::run(cores, count, arguments, [&] { kernel(TURBOGR_ARGUMENTS_##count(arguments)); });       \
    }

#define TURBOGR_LAUNCH_MIXED(kernel, count) TURBOGR_LAUNCH_ON(kernel, count, 2 * int64_t{blocks})
#define TURBOGR_LAUNCH_VECTOR(kernel, count) TURBOGR_LAUNCH_ON(kernel, count, int64_t{blocks})
