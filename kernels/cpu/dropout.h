// Interface of the dropout kernel: plain C on raw pointers, called through ctypes (turbogr/ops/dropout_native.py mirrors the
// struct).
#pragma once

#include <cstdint>

extern "C" {

// Strides count floats; rows are contiguous. columns < 2^32.
struct TurbogrDropout {
    int64_t rows, columns;
    const float* in;
    int64_t in_row;
    float* out;
    int64_t out_row;
    uint64_t seed, threshold;  // threshold < 2^32
    float scale;
    int64_t threads;
};

void turbogr_dropout(const TurbogrDropout* problem);
}
