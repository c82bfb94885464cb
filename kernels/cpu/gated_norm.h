// Interface of the gated norm kernel: plain C on raw pointers, called through ctypes (turbogr/ops/gated_norm_native.py mirrors
// the struct).
#pragma once

#include <cstdint>

extern "C" {

// out = gate * norm(x), or norm(x) where gate is null, then dropout as in random_bits.h. Strides count floats; rows are contiguous. columns < 2^32.
struct TurbogrGatedNorm {
    int64_t rows, columns;
    const float* gate;
    int64_t gate_row;
    const float* x;
    int64_t x_row;
    int64_t centre;  // 1: layer norm, 0: root mean square norm
    float eps;
    uint64_t seed, threshold;  // threshold < 2^32; 0 keeps everything
    float scale;
    int64_t threads;
};

// Outputs are contiguous, [rows, columns]; grad_gate is null where gate is.
void turbogr_gated_norm_forward(const TurbogrGatedNorm* problem, float* out);
void turbogr_gated_norm_backward(
    const TurbogrGatedNorm* problem, const float* gradient, int64_t gradient_row, float* grad_gate, float* grad_x);
}
