// The tasks of attention and what they are given: part of the interface between host and kernels.
#pragma once

#include <cstdint>

#include "align.h"

namespace turbogr::ascend {

// Rows first ... first + BLOCK_ROWS of the sequence whose first token is `token`, as far as its length reaches.
struct RowBlock {
    int32_t token, length, first;
};

constexpr int64_t ROW_BLOCK_INTS = 3;  // of a RowBlock in a packed plan

}  // namespace turbogr::ascend
