// How CANN's compiler launches a kernel; to be included before the kernel. The tests have a header of this name, too, for the
// stand-in.
#pragma once

#include <cstdint>

#ifdef ASCENDC_CPU_DEBUG
#include "cpu_debug_launch.h"  // of CANN: <<<>>> in the CPU twin
#endif

#include "../arguments.h"

// turbogr_launch_<kernel>: `blocks` of cores on `stream`; 0, or an error code of CANN's. A block of a MIXED kernel is a cube core
// with two vector cores, of a VECTOR one a vector core. Errors of the launch come with the stream's next synchronisation.
#define TURBOGR_LAUNCH(kernel, count)                                                                             \
    extern "C" __attribute__((visibility("default"))) uint32_t turbogr_launch_##kernel(                           \
        uint32_t blocks, void* stream, void* const* arguments) {                                                  \
        kernel<<<blocks, nullptr, stream>>>(TURBOGR_ARGUMENTS_##count(arguments));                                \
        return 0;                                                                                                 \
    }

#define TURBOGR_LAUNCH_MIXED(kernel, count) TURBOGR_LAUNCH(kernel, count)
#define TURBOGR_LAUNCH_VECTOR(kernel, count) TURBOGR_LAUNCH(kernel, count)
