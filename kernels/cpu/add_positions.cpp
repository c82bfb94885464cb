// Scaled tokens plus the embedding of their position, with dropout. Backward goes over positions, and for a few of them over all
// sequences in their order: every row of the table's gradient is summed by one thread in the order of the batch.

#include "add_positions.h"

#include <algorithm>

#include "elementwise.h"
#include "random_bits.h"

using namespace turbogr;

namespace {

constexpr int64_t POSITIONS = 8;  // taken together: a sequence's rows are then read in runs

}  // namespace

void turbogr_add_positions_forward(
    const TurbogrAddPositions* problem, const float* x, int64_t x_row, const float* table, int64_t table_row, float* out) {
    const TurbogrAddPositions& p = *problem;
    const Mask mask{p.seed, static_cast<uint32_t>(p.threshold), p.kept_scale};
    const int64_t tokens = p.offsets[p.sequences];
    for_rows(tokens, p.width, p.threads, [&](int64_t token) {
        const int64_t start = *(std::upper_bound(p.offsets, p.offsets + p.sequences + 1, token) - 1);
        const float *from = x + token * x_row, *position = table + (token - start) * table_row;
        const RowFactors dropout(mask, token);
        columns(p.width, [&](int64_t column, auto count) {
            const Vector sum = load(from + column, count) * p.scale + load(position + column, count);
            store(out + token * p.width + column, sum * dropout.at(column), count);
        });
    });
}

void turbogr_add_positions_backward(
    const TurbogrAddPositions* problem, const float* gradient, int64_t gradient_row, int64_t table_rows, float* grad_x, float* grad_table) {
    const TurbogrAddPositions& p = *problem;
    const Mask mask{p.seed, static_cast<uint32_t>(p.threshold), p.kept_scale};
    const int64_t tokens = p.offsets[p.sequences];
    const int64_t blocks = (table_rows + POSITIONS - 1) / POSITIONS;
    const int threads = static_cast<int>(std::clamp<int64_t>(p.threads, 1, tokens * p.width / ELEMENTS_PER_THREAD + 1));
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads)
    for (int64_t block = 0; block < blocks; block++) {
        const int64_t first = block * POSITIONS, end = std::min(first + POSITIONS, table_rows);
        std::fill(grad_table + first * p.width, grad_table + end * p.width, 0.0f);
        for (int64_t b = 0; b < p.sequences; b++) {
            const int64_t start = p.offsets[b], length = p.offsets[b + 1] - start;
            for (int64_t position = first; position < std::min(end, length); position++) {
                const int64_t token = start + position;
                float *total = grad_table + position * p.width, *to = grad_x + token * p.width;
                const RowFactors dropout(mask, token);
                columns(p.width, [&](int64_t column, auto count) {
                    const Vector g = load(gradient + token * gradient_row + column, count) * dropout.at(column);
                    store(to + column, g * p.scale, count);
                    store(total + column, load(total + column, count) + g, count);
                });
            }
        }
    }
}
