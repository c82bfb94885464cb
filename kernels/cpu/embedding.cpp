// Embedding tables on a CPU in float32: look-up, its gradient, and updates of the rows that a batch touched.
//
// All of it moves rows, and little else: rows are fetched ahead, a large output is written past the caches. A gradient is summed
// row by row in the order of the batch (segment_sums.h), and never by several threads at the same number: the result does not
// depend on their count. An update reads and writes nothing but the rows it concerns.

#include "embedding.h"

#include <algorithm>
#include <cstring>

#include "row_rules.h"
#include "rows.h"
#include "segment_sums.h"

namespace turbogr {
namespace {

constexpr int64_t DONE = -1, NO_MEMORY = -2;

constexpr int64_t LOOKUP_AHEAD = 8;

// An output of so many bytes does not stay in the caches anyway.
constexpr int64_t LARGE_OUTPUT = int64_t{8} << 20;

constexpr int64_t FLOATS_PER_THREAD = 1 << 15;

bool can_stream(const float* out, int64_t stride, int64_t width) {
#if defined(__AVX__)
    return width % LANES == 0 && stride % LANES == 0 && reinterpret_cast<uintptr_t>(out) % sizeof(Vector) == 0;
#else
    return (void)out, (void)stride, (void)width, false;
#endif
}

void stream_row(float* to, const float* from, int64_t width) {
#if defined(__AVX512F__)
    for (int64_t c = 0; c < width; c += LANES) _mm512_stream_ps(to + c, load(from + c));
#elif defined(__AVX__)
    for (int64_t c = 0; c < width; c += LANES) _mm256_stream_ps(to + c, load(from + c));
#else
    copy_row(to, from, width);
#endif
}

void streamed() {
#if defined(__AVX__)
    _mm_sfence();
#endif
}

int threads_for(int64_t wanted, int64_t floats) {
    return static_cast<int>(std::clamp<int64_t>(floats / FLOATS_PER_THREAD, 1, std::max<int64_t>(wanted, 1)));
}

// A finished sum is a row of a table's gradient.
struct Write {
    float* table;
    int64_t width;

    void prefetch(int64_t) const {}
    void operator()(int64_t row, const float* sum) const {
        float* to = table + row * width;
        if (sum == nullptr) {
            std::memset(to, 0, static_cast<size_t>(width) * sizeof(float));
        } else {
            copy_row(to, sum, width);
        }
    }
};

// A finished sum updates a row and its state.
template <typename Rule>
struct Update {
    const TurbogrRowUpdate& p;
    Rule rule{p};
    bool row_wise = p.rule == 2;

    void prefetch(int64_t segment) const {
        const int64_t row = p.rows[segment];
        prefetch_for_writing(p.weight + row * p.weight_stride, p.width);
        if (p.first != nullptr) prefetch_for_writing(p.first + row * p.first_stride, row_wise ? 1 : p.width);
        if (p.second != nullptr) prefetch_for_writing(p.second + row * p.second_stride, p.width);
    }
    void operator()(int64_t segment, const float* sum) const {
        const int64_t row = p.rows[segment];
        float* first = p.first == nullptr ? nullptr : p.first + row * p.first_stride;
        float* second = p.second == nullptr ? nullptr : p.second + row * p.second_stride;
        if (sum != nullptr) rule(p.weight + row * p.weight_stride, first, second, sum, p.width);
    }
};

template <typename Rule>
int64_t update(const TurbogrRowUpdate& p) {
    const Segments segments{p.count, p.order, p.starts};
    const int threads = threads_for(p.threads, segments.positions() * p.width);
    return sum_segments(segments, p.gradient, p.gradient_stride, p.width, threads, Update<Rule>{p}) ? DONE : NO_MEMORY;
}

}  // namespace
}  // namespace turbogr

using namespace turbogr;

int64_t turbogr_lookup_forward(const TurbogrLookup* problem, float* out, int64_t out_stride) {
    const TurbogrLookup& p = *problem;
    const int64_t floats = p.splits[p.tables] * p.width;
    const bool stream = floats * static_cast<int64_t>(sizeof(float)) >= LARGE_OUTPUT && can_stream(out, out_stride, p.width);
    int64_t wrong = INT64_MAX;
#pragma omp parallel num_threads(threads_for(p.threads, floats)) reduction(min : wrong)
    {
        for (int64_t k = 0; k < p.tables; k++) {
            const float* weight = p.weights[k];
            const int64_t rows = p.rows[k], stride = p.strides[k], end = p.splits[k + 1];
#pragma omp for schedule(static) nowait
            for (int64_t i = p.splits[k]; i < end; i++) {
                if (i + LOOKUP_AHEAD < end && !outside(p.ids[i + LOOKUP_AHEAD], rows))
                    prefetch(weight + p.ids[i + LOOKUP_AHEAD] * stride, p.width);
                if (outside(p.ids[i], rows)) {
                    wrong = std::min(wrong, i);
                    continue;
                }
                const float* row = weight + p.ids[i] * stride;
                stream ? stream_row(out + i * out_stride, row, p.width) : copy_row(out + i * out_stride, row, p.width);
            }
        }
        if (stream) streamed();
    }
    return wrong == INT64_MAX ? DONE : wrong;
}

int64_t turbogr_lookup_backward(const TurbogrLookup* problem, const float* gradient, int64_t stride, float* const* tables) {
    const TurbogrLookup& p = *problem;
    for (int64_t k = 0; k < p.tables; k++) {
        if (tables[k] == nullptr) continue;
        const int64_t begin = p.splits[k], count = p.splits[k + 1] - begin;
        Grouping grouping;
        const int64_t wrong = grouping.build(p.ids + begin, count, p.rows[k]);
        if (wrong != DONE) return wrong == NO_MEMORY ? NO_MEMORY : begin + wrong;
        const int threads = threads_for(p.threads, (count + p.rows[k]) * p.width);
        const Write write{tables[k], p.width};
        if (!sum_segments(grouping.segments(p.rows[k]), gradient + begin * stride, stride, p.width, threads, write)) return NO_MEMORY;
    }
    return DONE;
}

int64_t turbogr_row_update(const TurbogrRowUpdate* problem) {
    const TurbogrRowUpdate& p = *problem;
    for (int64_t u = 0; u < p.count; u++)
        if (outside(p.rows[u], p.num_rows)) return u;
    switch (p.rule) {
        case 0: return update<SGD>(p);
        case 1: return update<AdaGrad>(p);
        case 2: return update<RowWiseAdaGrad>(p);
        default: return update<LazyAdam>(p);
    }
}
