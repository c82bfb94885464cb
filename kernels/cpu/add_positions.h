// Interface of the kernel of a backbone's input: plain C on raw pointers, called through ctypes
// (turbogr/ops/add_positions_native.py mirrors the struct).
#pragma once

#include <cstdint>

extern "C" {

// out[t] = scale * x[t] + table[t - start of t's sequence], then dropout as in random_bits.h. Strides count floats; rows are
// contiguous. width < 2^32.
struct TurbogrAddPositions {
    int64_t sequences, width;
    const int64_t* offsets;  // [sequences + 1]
    float scale;
    uint64_t seed, threshold;  // threshold < 2^32; 0 keeps everything
    float kept_scale;
    int64_t threads;
};

// Outputs are contiguous. The table has at least as many rows as the longest sequence.
void turbogr_add_positions_forward(
    const TurbogrAddPositions* problem, const float* x, int64_t x_row, const float* table, int64_t table_row, float* out);

// grad_table [table_rows, width] is written whole.
void turbogr_add_positions_backward(
    const TurbogrAddPositions* problem, const float* gradient, int64_t gradient_row, int64_t table_rows, float* grad_x, float* grad_table);
}
