// Interface of the embedding kernels: plain C on raw pointers, called through ctypes (turbogr/ops/embedding_native.py mirrors the
// structs). Strides count floats; the last axis of everything is contiguous.
#pragma once

#include <cstdint>

extern "C" {

// Tables of one width; table k serves ids[splits[k]] to ids[splits[k + 1] - 1].
struct TurbogrLookup {
    int64_t tables, width;
    const float* const* weights;  // [tables], each [rows[k], width]
    const int64_t *rows, *strides;  // [tables]
    const int64_t *ids, *splits;  // [splits[tables]], [tables + 1]
    int64_t threads;
};

// Updates weight[rows[u]] and its state. Its gradient is row u of `gradient`, or, if `starts` is not null, the sum of the rows
// order[starts[u]] to order[starts[u + 1] - 1] of it.
struct TurbogrRowUpdate {
    int64_t rule;  // 0 SGD, 1 AdaGrad, 2 row-wise AdaGrad, 3 LazyAdam
    int64_t num_rows, width;
    float* weight;  // [num_rows, width]
    int64_t weight_stride;
    float *first, *second;  // [num_rows, width]: AdaGrad's sum ([num_rows, 1] if row-wise); Adam's two moments; else null
    int64_t first_stride, second_stride;
    int64_t count;
    const int64_t *rows, *order, *starts;  // rows [count] are distinct
    const float* gradient;
    int64_t gradient_stride;
    double lr, eps, beta1, beta2, weight_decay;
    double correction;  // Adam's, of both moments
    int64_t threads;
};

// All return -1 if all went well, -2 if there was no memory for scratch, and else the position of the first id (or row) that lies
// outside its table; nothing has then been updated.
int64_t turbogr_lookup_forward(const TurbogrLookup* problem, float* out, int64_t out_stride);

// Writes the gradient of every table [rows[k], width] whole, given that of the output [splits[tables], width]; a null pointer in
// `tables` for one that is not wanted. The weights of the problem are not read.
int64_t turbogr_lookup_backward(const TurbogrLookup* problem, const float* gradient, int64_t stride, float* const* tables);

int64_t turbogr_row_update(const TurbogrRowUpdate* problem);
}
