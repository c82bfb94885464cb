// Tiling of negative_logits, forward and backward: shared by host, kernels and tests. Pure C++17.
#pragma once

#include <cstdint>

#include "../../common/align.h"
#include "../../common/even_parts.h"
#include "../../common/sum_parts.h"

namespace turbogr::ascend {

constexpr int64_t NEGATIVE_NUMBERS = 2048, NEGATIVE_LANES = VECTOR_BYTES / 4;

struct NegativeShapes {
    int64_t tokens, samples, rows, width, element_bytes;
    int64_t cores;  // vector cores that run the kernel
};

struct NegativeTiling {
    int64_t tokens, samples, rows;
    int32_t cores;
    int32_t block_rows, numbers;  // forward: rows that are fetched at once, also tokens; entries of the index that are read at once
    int32_t lanes, lane_pitch;    // forward: a row's products are folded into so many, which lie so far apart
    int32_t reserved;
    SumTiling sums;               // backward
};

// Bytes of local memory that the forward kernel asks for.
inline int64_t negative_local_bytes(const NegativeTiling& t, int64_t element_bytes) {
    const int64_t row = t.sums.pitch * 4, narrow_row = t.sums.pitch * element_bytes;
    int64_t bytes = t.block_rows * (2 * narrow_row + narrow_row + t.lane_pitch * 4);  // rows, tokens, products
    if (element_bytes != 4) bytes += t.block_rows * 2 * row;                          // both as floats
    const int64_t logits = round_up(t.block_rows, COPY_BYTES / element_bytes);
    return bytes + round_up(t.block_rows * 4, COPY_BYTES) + 2 * logits * element_bytes + t.numbers * 8;
}

// Bytes of the kernel's own workspace: rows that cores share.
inline int64_t negative_workspace_bytes(const NegativeTiling& t, bool backward) {
    return backward ? sum_workspace_bytes(t.sums, t.cores) : 0;
}

// Fills the tiling of both kernels. Returns null, or what is wrong.
inline const char* negative_tiling(NegativeTiling& t, const NegativeShapes& s) {
    if (s.cores < 1) return "there must be cores";
    if (s.tokens < 0 || s.samples < 0 || s.rows < 0) return "tokens, samples and rows cannot be negative";
    t = NegativeTiling{};
    if (const char* error = sum_tiling(t.sums, s.width, s.element_bytes, true)) return error;
    t.tokens = s.tokens;
    t.samples = s.samples;
    t.rows = s.rows;
    t.cores = static_cast<int32_t>(s.cores);
    t.numbers = static_cast<int32_t>(NEGATIVE_NUMBERS);
    t.lanes = static_cast<int32_t>(smaller(s.width, NEGATIVE_LANES));
    t.lane_pitch = static_cast<int32_t>(round_up(t.lanes, COPY_BYTES / 4));
    t.block_rows = static_cast<int32_t>(SUM_MOST_ROWS);
    while (t.block_rows > 1 && negative_local_bytes(t, s.element_bytes) > LOCAL_BYTES) t.block_rows /= 2;
    return nullptr;
}

}  // namespace turbogr::ascend
