// Interface of the l2 normalisation kernel: plain C on raw pointers, called through ctypes (turbogr/ops/normalise_native.py
// mirrors the struct).
#pragma once

#include <cstdint>

extern "C" {

// Strides count floats; rows are contiguous.
struct TurbogrL2Normalise {
    int64_t rows, columns;
    const float* x;
    int64_t x_row;
    float eps;
    int64_t threads;
};

// Outputs are contiguous, [rows, columns].
void turbogr_l2_normalise_forward(const TurbogrL2Normalise* problem, float* out);
void turbogr_l2_normalise_backward(
    const TurbogrL2Normalise* problem, const float* gradient, int64_t gradient_row, float* grad_x);
}
