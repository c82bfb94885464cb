// Interface of the softmax attention kernel: plain C on raw pointers, called through ctypes (turbogr/ops/softmax_native.py
// mirrors the structs).
#pragma once

#include <cstdint>

extern "C" {

// Strides count floats; the last axis of q, k, v, of the output and of all their gradients is contiguous.
struct TurbogrSoftmax {
    int64_t sequences, heads, qk_width, v_width;
    const int64_t* offsets;  // [sequences + 1]
    const float *q, *k, *v;  // [T, heads, width]
    int64_t q_row, q_head, k_row, k_head, v_row, v_head;
    float scale;
    int64_t threads;
};

struct TurbogrSoftmaxResult {
    float* out;  // [T, heads, v_width]
    int64_t out_row, out_head;
    float* log_sums;  // [T, heads], contiguous: ln of the sum of exp of each row's scores
};

struct TurbogrSoftmaxGradients {
    const float *out, *log_sums;  // of forward
    const float* incoming;        // [T, heads, v_width]
    int64_t out_row, out_head, incoming_row, incoming_head;
    float *q, *k, *v;
    int64_t q_row, q_head, k_row, k_head, v_row, v_head;
};

// Both return 0, or 1 if there was no memory for the threads' scratch.
int turbogr_softmax_forward(const TurbogrSoftmax* problem, const TurbogrSoftmaxResult* result);
int turbogr_softmax_backward(const TurbogrSoftmax* problem, const TurbogrSoftmaxGradients* gradients);
}
