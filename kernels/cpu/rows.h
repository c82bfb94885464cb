// Rows of floats of any width: whole vectors and what remains of a row, copies and prefetches.
#pragma once

#include <cmath>
#include <cstdint>
#include <type_traits>

#include "vectors.h"

#if defined(__SSE__)
#include <xmmintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace turbogr {

constexpr int64_t LINE = 16;  // floats of a cache line

using Whole = std::integral_constant<int, LANES>;

// load, store and first lanes of the last vector of a row, which holds `count` < LANES floats; the other lanes are zero.
static inline Vector load(const float* from, int64_t count) {
#if defined(__AVX512F__)
    return _mm512_maskz_loadu_ps(static_cast<__mmask16>((1u << count) - 1), from);
#else
    Vector x{};
    for (int64_t lane = 0; lane < count; lane++) x[lane] = from[lane];
    return x;
#endif
}

static inline void store(float* to, Vector x, int64_t count) {
#if defined(__AVX512F__)
    _mm512_mask_storeu_ps(to, static_cast<__mmask16>((1u << count) - 1), x);
#else
    for (int64_t lane = 0; lane < count; lane++) to[lane] = x[lane];
#endif
}

static inline Vector load(const float* from, Whole) { return load(from); }
static inline void store(float* to, Vector x, Whole) { store(to, x); }

// Calls each(column, count) for the vectors of a row; count is Whole, or an integer for what remains.
template <typename Each>
static inline void columns(int64_t width, const Each& each) {
    int64_t column = 0;
    for (; column + LANES <= width; column += LANES) each(column, Whole());
    if (column < width) each(column, width - column);
}

static inline Vector square_root(Vector x) {
#if defined(__AVX512F__)
    return _mm512_sqrt_ps(x);
#elif defined(__AVX__)
    return _mm256_sqrt_ps(x);
#elif defined(__SSE__)
    return _mm_sqrt_ps(x);
#elif defined(__aarch64__)
    return vsqrtq_f32(x);
#else
    for (int lane = 0; lane < LANES; lane++) x[lane] = std::sqrt(x[lane]);
    return x;
#endif
}

static inline void prefetch(const float* row, int64_t width) {
    for (int64_t column = 0; column < width; column += LINE) __builtin_prefetch(row + column);
}

static inline void prefetch_for_writing(float* row, int64_t width) {
    for (int64_t column = 0; column < width; column += LINE) __builtin_prefetch(row + column, 1);
}

static inline bool outside(int64_t row, int64_t rows) { return static_cast<uint64_t>(row) >= static_cast<uint64_t>(rows); }

}  // namespace turbogr
