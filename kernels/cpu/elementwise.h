// Loops of elementwise operators over the rows and columns of a matrix, and vectors that are cut off at a row's end.
#pragma once

#include <algorithm>
#include <type_traits>

#include "vectors.h"

namespace turbogr {

constexpr int64_t ELEMENTS_PER_THREAD = 1 << 14;  // fewer are done before another thread has woken up

// Calls run(row) for every row, on several threads if that is worth it.
template <typename Run>
void for_rows(int64_t rows, int64_t columns, int64_t wanted_threads, Run run) {
    const int64_t worth = rows * columns / ELEMENTS_PER_THREAD + 1;
    const int threads = static_cast<int>(std::clamp<int64_t>(wanted_threads, 1, worth));
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t row = 0; row < rows; row++) run(row);
}

using Whole = std::integral_constant<int64_t, LANES>;

// Calls run(column, count) for every vector of a row: count is Whole, or the number of elements left for the last vector.
template <typename Run>
inline void for_columns(int64_t columns, Run run) {
    int64_t column = 0;
    for (; column + LANES <= columns; column += LANES) run(column, Whole{});
    if (column < columns) run(column, columns - column);
}

static inline Vector keep_first(Vector x, Whole) { return x; }
static inline Vector keep_first(Vector x, int64_t count) { return first_lanes(x, count); }
static inline Vector load_first(const float* from, Whole) { return load(from); }
static inline void store_first(float* to, Vector x, Whole) { store(to, x); }

// The first `count` elements, zero in the other lanes; nothing behind them is touched.
static inline Vector load_first(const float* from, int64_t count) {
#if defined(__AVX512F__)
    return _mm512_maskz_loadu_ps(static_cast<__mmask16>((1u << count) - 1), from);
#else
    Vector x{};
    for (int lane = 0; lane < LANES; lane++)
        if (lane < count) x[lane] = from[lane];
    return x;
#endif
}

static inline void store_first(float* to, Vector x, int64_t count) {
#if defined(__AVX512F__)
    _mm512_mask_storeu_ps(to, static_cast<__mmask16>((1u << count) - 1), x);
#else
    for (int lane = 0; lane < LANES; lane++)
        if (lane < count) to[lane] = x[lane];
#endif
}

}  // namespace turbogr
