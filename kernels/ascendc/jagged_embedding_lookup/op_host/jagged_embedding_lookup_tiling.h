// Tiling of jagged_embedding_lookup, forward and backward: shared by host, kernels and tests. Pure C++17.
#pragma once

#include <cstdint>

#include "../../common/align.h"
#include "../../common/even_parts.h"
#include "../../common/sum_parts.h"

namespace turbogr::ascend {

constexpr int64_t LOOKUP_NUMBERS = 2048, LOOKUP_MOST_ROWS = 256, LOOKUP_BLOCK_BYTES = 32 * 1024;

// A table, or in backward its gradient, as the kernels read it from global memory: numbers in this order.
struct LookupTable {
    int64_t address;     // 0 in backward: this gradient is not wanted
    int64_t rows;
    int64_t begin, end;  // its ids
    int64_t first_row;   // rows of the tables before it
};

constexpr int64_t LOOKUP_TABLE_NUMBERS = sizeof(LookupTable) / sizeof(int64_t);

struct LookupShapes {
    int64_t tables, ids, rows, width, element_bytes;  // rows of all tables together
    int64_t cores;                                    // vector cores that run the kernel
};

struct LookupTiling {
    int64_t ids, rows;
    int32_t tables, cores;
    int32_t block_rows, numbers;  // forward: rows that are copied at once, ids that are read at once
    SumTiling sums;               // backward
};

// Bytes of local memory that the forward kernel asks for.
inline int64_t lookup_local_bytes(const LookupTiling& t, int64_t element_bytes) {
    return 2 * t.block_rows * t.sums.pitch * element_bytes + t.numbers * 8;
}

// Bytes of the kernel's own workspace: rows that cores share.
inline int64_t lookup_workspace_bytes(const LookupTiling& t, bool backward) {
    return backward ? sum_workspace_bytes(t.sums, t.cores) : 0;
}

// Fills the tiling of both kernels. Returns null, or what is wrong.
inline const char* lookup_tiling(LookupTiling& t, const LookupShapes& s) {
    if (s.tables < 1 || s.cores < 1 || s.tables >= int64_t{1} << 31) return "there must be tables and cores";
    if (s.ids < 0 || s.rows < 0) return "ids and rows cannot be negative";
    t = LookupTiling{};
    if (const char* error = sum_tiling(t.sums, s.width, s.element_bytes, false)) return error;
    t.ids = s.ids;
    t.rows = s.rows;
    t.tables = static_cast<int32_t>(s.tables);
    t.cores = static_cast<int32_t>(s.cores);
    t.numbers = static_cast<int32_t>(LOOKUP_NUMBERS);
    const int64_t fit = LOOKUP_BLOCK_BYTES / (t.sums.pitch * s.element_bytes);
    t.block_rows = static_cast<int32_t>(smaller(LOOKUP_MOST_ROWS, larger(1, fit)));
    return nullptr;
}

}  // namespace turbogr::ascend
