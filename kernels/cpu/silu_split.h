// Interface of the SiLU-and-split kernel: plain C on raw pointers, called through ctypes (turbogr/ops/silu_split_native.py
// mirrors the structs).
#pragma once

#include <cstdint>

extern "C" {

// A block of columns of the packed matrix, as a matrix of its own. Strides count floats; rows are contiguous.
struct TurbogrPart {
    float* data;
    int64_t columns, row;
};

struct TurbogrSiluSplit {
    int64_t rows;
    const float* packed;  // [rows, all parts' columns side by side]
    int64_t packed_row;
    const TurbogrPart* parts;
    int64_t count;
    int64_t threads;
};

// parts = SiLU(packed), written.
void turbogr_silu_split_forward(const TurbogrSiluSplit* problem);

// The parts hold gradients, read (null data: zero); grad_packed is contiguous.
void turbogr_silu_split_backward(const TurbogrSiluSplit* problem, float* grad_packed);
}
