// Runs the elementwise kernels over awkward shapes on heap buffers of exact size, so that a sanitizer sees every access outside.
// dropout.cpp is compiled beside this file, the others are small enough to be included. With an argument, the output of two is
// one float short: that must be noticed.

#include <cmath>
#include <cstdio>
#include <memory>
#include <random>
#include <vector>

#include "add_positions.cpp"
#include "dropout.h"
#include "gated_norm.cpp"
#include "l2_normalise.cpp"
#include "silu_split.cpp"

namespace {

std::mt19937 generator(7);

std::unique_ptr<float[]> random_floats(int64_t count) {
    std::normal_distribution<float> normal;
    std::unique_ptr<float[]> x(new float[count]);
    for (int64_t i = 0; i < count; i++) x[i] = normal(generator);
    return x;
}

std::unique_ptr<float[]> room(int64_t count) { return std::unique_ptr<float[]>(new float[count]); }

bool finite(const std::unique_ptr<float[]>& x, int64_t count) {
    for (int64_t i = 0; i < count; i++)
        if (!std::isfinite(x[i])) return false;
    return true;
}

// Rows of `columns` floats, `gap` apart; the last row ends with its last float.
int64_t extent(int64_t rows, int64_t columns, int64_t gap) { return rows == 0 ? 0 : (rows - 1) * (columns + gap) + columns; }

bool run(int64_t rows, int64_t columns, int64_t gap, uint64_t threshold, int64_t missing) {
    const int64_t count = rows * columns, row = columns + gap;
    const auto x = random_floats(extent(rows, columns, gap)), gate = random_floats(extent(rows, columns, gap));
    const auto incoming = random_floats(extent(rows, columns, gap));
    const auto out = room(count - missing), grad_gate = room(count), grad_x = room(count);
    TurbogrDropout d{rows, columns, x.get(), row, out.get(), columns, 5, threshold, 1.5f, 2};
    turbogr_dropout(&d);
    bool sound = finite(out, count);
    for (const int64_t centre : {0, 1}) {
        TurbogrGatedNorm p{rows, columns, gate.get(), row, x.get(), row, centre, 1e-6f, 5, threshold, 1.5f, 2};
        turbogr_gated_norm_forward(&p, out.get());
        turbogr_gated_norm_backward(&p, incoming.get(), row, grad_gate.get(), grad_x.get());
        sound = sound && finite(out, count) && finite(grad_gate, count) && finite(grad_x, count);
        p.gate = nullptr;
        turbogr_gated_norm_forward(&p, out.get());
        turbogr_gated_norm_backward(&p, incoming.get(), row, nullptr, grad_x.get());
        sound = sound && finite(out, count) && finite(grad_x, count);
    }
    // Two parts: the first column alone, and the others; the second has no gradient where there is a gap.
    const auto first = room(extent(rows, 1, gap)), others = room(extent(rows, columns - 1, gap));
    const TurbogrPart parts[] = {{first.get(), 1, 1 + gap}, {others.get(), columns - 1, columns - 1 + gap}};
    TurbogrSiluSplit s{rows, x.get(), row, parts, 2, 2};
    turbogr_silu_split_forward(&s);
    const TurbogrPart gradients[] = {parts[0], {gap == 0 ? others.get() : nullptr, columns - 1, columns - 1 + gap}};
    s.parts = gradients;
    turbogr_silu_split_backward(&s, grad_x.get());
    sound = sound && finite(grad_x, count);
    TurbogrL2Normalise l{rows, columns, x.get(), row, 1e-6f, 2};
    turbogr_l2_normalise_forward(&l, out.get());
    turbogr_l2_normalise_backward(&l, incoming.get(), row, grad_x.get());
    sound = sound && finite(out, count) && finite(grad_x, count);
    // Rows as tokens of four sequences, two of them empty.
    std::unique_ptr<int64_t[]> offsets(new int64_t[5]{0, rows / 3, rows / 3, rows, rows});
    const int64_t longest = rows - rows / 3;
    const auto table = random_floats(longest * columns), grad_table = room((longest + 1) * columns);
    TurbogrAddPositions a{4, columns, offsets.get(), 2.0f, 5, threshold, 1.5f, 2};
    turbogr_add_positions_forward(&a, x.get(), row, table.get(), columns, out.get());
    turbogr_add_positions_backward(&a, incoming.get(), row, longest + 1, grad_x.get(), grad_table.get());
    return sound && finite(out, count) && finite(grad_x, count) && finite(grad_table, (longest + 1) * columns);
}

}  // namespace

int main(int count, char**) {
    if (count > 1) return run(3, 17, 0, 1, 1) ? 0 : 1;
    int checked = 0;
    for (const int64_t rows : {0, 1, 2, 3, 63, 64, 700})
        for (const int64_t columns : {1, 2, 3, 7, 8, 15, 16, 17, 31, 33, 50, 64, 130})
            for (const int64_t gap : {0, 1, 5})
                for (const uint64_t threshold : {uint64_t{0}, uint64_t{1} << 30, (uint64_t{1} << 32) - 1}) {
                    if (!run(rows, columns, gap, threshold, 0)) {
                        std::fprintf(stderr, "failed: %d rows, %d columns\n", int(rows), int(columns));
                        return 1;
                    }
                    checked++;
                }
    std::printf("checked %d problems\n", checked);
    return 0;
}
