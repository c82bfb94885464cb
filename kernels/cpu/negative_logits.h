// Interface of the kernel of sampled rows: plain C on raw pointers, called through ctypes
// (turbogr/ops/negative_logits_native.py mirrors the struct).
#pragma once

#include <cstdint>

extern "C" {

enum { TURBOGR_FLOAT32 = 0, TURBOGR_FLOAT16 = 1, TURBOGR_BFLOAT16 = 2 };

// Every token has `count` samples, which are rows of a table. Where there are targets, a token's target is its sample 0 and its
// entries of `index` follow; then count is one more than the width of `index`.
struct TurbogrSamples {
    int64_t tokens, count, width, rows;  // tokens < 2^32
    const float* output;       // [tokens, width]
    int64_t output_row;        // stride in floats
    const void* table;         // [rows, width]
    int64_t table_row;         // stride in numbers
    int64_t table_type;        // TURBOGR_FLOAT32, or a narrower one where a function says so
    const int64_t* targets;    // [tokens], or null
    const int64_t* index;      // [tokens, count], or [tokens, count - 1] with targets
    const float* bias;         // [rows], or null
    const float* row_factors;  // [rows], or null: table[u] stands for row_factors[u] * table[u] where a function says so
    int64_t lent;              // the last `lent` samples of a token, never its target, give the table no gradient
    int64_t threads;
};

// All return 0, 1 if there was no memory for scratch, or 2 if a sample is outside the table: then *wrong is the first such one,
// counted token by token.

// logits[t, s] = output[t] . table[sample s of t]. Any type of table, and row_factors.
int turbogr_negative_logits(const TurbogrSamples* samples, float* logits, int64_t* wrong);

// Needs targets. With l[t, s] = output[t] . table[sample s of t] / temperature + bias[sample s of t], where samples s > 0 that
// equal the target are left out: loss[t] = -log softmax(l[t])[0], coefficients[t, s] = its derivative by
// output[t] . table[sample s of t], [tokens, count - lent], and direction[t] = its derivative by output[t], [tokens, width].
int turbogr_sampled_softmax(
    const TurbogrSamples* samples, float temperature, float* loss, float* coefficients, float* direction, int64_t* wrong
);

// sums[t] = sum over s of weights[t, s] * table[sample s of t], [tokens, width]. Any type of table, and row_factors. Reads no
// output.
int turbogr_weighted_rows(const TurbogrSamples* samples, const float* weights, float* sums, int64_t* wrong);

// sums[u] = sum over the samples that are row u, lent ones left out, of factors[t] * weights[t, s] * output[t], [rows, width],
// written whole; weights are [tokens, count - lent]. Without factors (null) they are 1. Reads no table.
int turbogr_row_sums(const TurbogrSamples* samples, const float* weights, const float* factors, float* sums, int64_t* wrong);
}
