// What elementwise operators over the rows of a matrix share, beside rows.h.
#pragma once

#include <algorithm>

#include "rows.h"

namespace turbogr {

constexpr int64_t ELEMENTS_PER_THREAD = 1 << 14;  // fewer are done before another thread has woken up

// Calls run(row) for every row, on several threads if that is worth it.
template <typename Run>
void for_rows(int64_t rows, int64_t width, int64_t wanted_threads, Run run) {
    const int64_t worth = rows * width / ELEMENTS_PER_THREAD + 1;
    const int threads = static_cast<int>(std::clamp<int64_t>(wanted_threads, 1, worth));
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t row = 0; row < rows; row++) run(row);
}

// The lanes' sum without a detour through memory, as `sum` of vectors.h makes it: rows are short and wait for theirs.
static inline float quick_sum(Vector x) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_ps(x);
#else
    return sum(x);
#endif
}

static inline Vector keep_first(Vector x, Whole) { return x; }
static inline Vector keep_first(Vector x, int64_t count) { return first_lanes(x, count); }

}  // namespace turbogr
