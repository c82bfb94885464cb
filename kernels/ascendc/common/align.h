// Sizes that host, kernels and tests agree on, and rounding to them. Pure C++17: a kernel includes kernel_operator.h before.
#pragma once

#include <cstdint>

// Marks what kernels call, too; on the host there is no such mark.
#ifdef __aicore__
#define TURBOGR_SHARED __aicore__ inline
#else
#define TURBOGR_SHARED inline
#endif

namespace turbogr::ascend {

constexpr int64_t LOCAL_BYTES = 192 * 1024;      // local memory of a vector core
constexpr int64_t SELECT_RESERVE = 8 * 1024;     // of it, what Select may use for itself
constexpr int64_t COPY_BYTES = 32;               // local addresses and lengths of copies are multiples of it
constexpr int64_t VECTOR_BYTES = 256;            // what one vector instruction works on; Compare takes whole ones
constexpr int64_t GLOBAL_BYTES = 512;            // parts of the workspace begin at multiples of it

constexpr int64_t BLOCK_ROWS = 256;  // rows of a task of attention
constexpr int64_t TILE = 64;         // side of the square tiles of biases; one side of attention's rectangular tiles

TURBOGR_SHARED constexpr int64_t ceil_divide(int64_t x, int64_t y) { return (x + y - 1) / y; }
TURBOGR_SHARED constexpr int64_t round_up(int64_t x, int64_t to) { return ceil_divide(x, to) * to; }
TURBOGR_SHARED constexpr int64_t smaller(int64_t x, int64_t y) { return x < y ? x : y; }
TURBOGR_SHARED constexpr int64_t larger(int64_t x, int64_t y) { return x < y ? y : x; }

}  // namespace turbogr::ascend
