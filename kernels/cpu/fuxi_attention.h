// Interface of the FuXi attention kernel: plain C on raw pointers, called through ctypes (turbogr/ops/fuxi_native.py mirrors
// the structs).
#pragma once

#include <cstdint>

#include "bias_tables.h"

extern "C" {

// Strides count floats; the last axis of q, k, v, of the output and of all their gradients is contiguous.
struct TurbogrFuxi {
    int64_t sequences, heads, qk_width, v_width;
    const int64_t* offsets;  // [sequences + 1]
    const float *q, *k, *v;  // [T, heads, width]
    int64_t q_row, q_head, k_row, k_head, v_row, v_head;
    TurbogrBias bias;             // tables of the position channel and of a bucketed time channel; not added to scores here
    const double* time_function;  // amplitude, decay, exponent, or null; if given, there is no time table in `bias`
    float scale, alpha;
    int64_t threads;
};

struct TurbogrFuxiGradients {
    const float* out;  // incoming, [T, heads, 3 v_width]
    int64_t out_row, out_head;
    float *q, *k, *v;
    int64_t q_row, q_head, k_row, k_head, v_row, v_head;
    float* position_bias;  // [position_count], written whole
    int64_t position_count;
    float* time_bias;       // [time_count], written whole
    double* time_function;  // [3], written whole
};

// `out` is [T, heads, 3 v_width]. Both return 0, or 1 if there was no memory for the threads' scratch.
int turbogr_fuxi_forward(const TurbogrFuxi* problem, float* out, int64_t out_row, int64_t out_head);
int turbogr_fuxi_backward(const TurbogrFuxi* problem, const TurbogrFuxiGradients* gradients);
}
