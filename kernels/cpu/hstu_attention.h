// Interface of the HSTU attention kernel: plain C on raw pointers, called through ctypes (turbogr/ops/hstu_native.py mirrors
// the structs).
#pragma once

#include <cstdint>

#include "bias_tables.h"

extern "C" {

// Strides count elements; the last axis of q, k, v, of the output and of all their gradients is contiguous.
struct TurbogrHstu {
    int64_t sequences, heads, qk_width, v_width;
    const int64_t* offsets;  // [sequences + 1]
    int64_t bfloat16;        // whether q, k, v, the output and their gradients hold bfloat16 instead of float32
    const void *q, *k, *v;   // [T, heads, width]
    int64_t q_row, q_head, k_row, k_head, v_row, v_head;
    TurbogrBias bias;
    float scale, alpha;
    int64_t bfloat16_products;  // whether the factors of matrix products are rounded to bfloat16; sums are float32
    int64_t threads;
};

struct TurbogrHstuGradients {
    const void* out;  // incoming, [T, heads, v_width]
    int64_t out_row, out_head;
    void *q, *k, *v;
    int64_t q_row, q_head, k_row, k_head, v_row, v_head;
    float* position_bias;  // [position_count], written whole
    int64_t position_count;
    float* time_bias;  // [time_count], written whole
};

// Both return 0, or 1 if there was no memory for the threads' scratch.
int turbogr_hstu_forward(const TurbogrHstu* problem, void* out, int64_t out_row, int64_t out_head);
int turbogr_hstu_backward(const TurbogrHstu* problem, const TurbogrHstuGradients* gradients);
}
