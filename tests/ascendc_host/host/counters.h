// What a launch moved and calculated, summed over its cores.
#pragma once

#include <algorithm>
#include <cstdint>

// Names of all counters in order; tests read them as they are, so that C++ and Python cannot disagree.
#define HOST_COUNTERS(X)                                                                        \
    X(bytes_global_to_local)    /* DataCopy, DataCopyPad: what was asked for, without padding */ \
    X(bytes_local_to_global)                                                                    \
    X(bytes_local_to_local)                                                                     \
    X(copies)                   /* calls of DataCopy and DataCopyPad */                         \
    X(bytes_matmul_operands)    /* each operand once per IterateAll */                          \
    X(bytes_matmul_results)                                                                     \
    X(matmuls)                  /* calls of IterateAll */                                       \
    X(cube_multiply_adds)                                                                       \
    X(vector_arithmetic)        /* elements of Add, Muls, Axpy, ... */                          \
    X(vector_functions)         /* elements of Exp, Ln, Sqrt, Div, Silu, ... */                 \
    X(vector_casts)                                                                             \
    X(vector_reductions)        /* elements that were summed */                                 \
    X(vector_selections)        /* Compare, CompareScalar, Select */                            \
    X(vector_gathers)                                                                           \
    X(vector_fills)             /* Duplicate, CreateVecIndex, Brcb: elements written */         \
    X(vector_calls)                                                                             \
    X(scalar_local_reads)       /* GetValue */                                                  \
    X(scalar_local_writes)      /* SetValue */                                                  \
    X(scalar_global_reads)                                                                      \
    X(scalar_global_writes)                                                                     \
    X(atomic_elements)          /* added to global memory atomically, by copies and results */  \
    X(events)                   /* SetFlag */                                                   \
    X(barriers)                 /* SyncAll, once per launch and epoch */                        \
    X(peak_local_bytes)         /* of the core that had most */

namespace host {

struct Counters {
#define HOST_COUNTER(name) int64_t name = 0;
    HOST_COUNTERS(HOST_COUNTER)
#undef HOST_COUNTER

    void add(const Counters& other) {
        const int64_t most = std::max(peak_local_bytes, other.peak_local_bytes);
#define HOST_COUNTER(name) name += other.name;
        HOST_COUNTERS(HOST_COUNTER)
#undef HOST_COUNTER
        peak_local_bytes = most;
    }
};

#define HOST_COUNTER(name) #name " "
inline constexpr const char* COUNTER_NAMES = HOST_COUNTERS(HOST_COUNTER);
#undef HOST_COUNTER

}  // namespace host
