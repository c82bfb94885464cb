// Runs the kernel of sampled rows over awkward shapes on heap buffers of exact size, so that a sanitizer sees every access
// outside. With an argument, a result is one float short: that must be noticed.

#include "negative_logits.h"

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <random>
#include <set>
#include <vector>

namespace {

std::mt19937 generator(7);

std::unique_ptr<float[]> random_floats(int64_t count) {
    std::normal_distribution<float> normal;
    std::unique_ptr<float[]> x(new float[count]);
    for (int64_t i = 0; i < count; i++) x[i] = normal(generator);
    return x;
}

bool finite(const float* x, int64_t count) {
    for (int64_t i = 0; i < count; i++)
        if (!std::isfinite(x[i])) return false;
    return true;
}

// `bad` is put in the place of the last sample, if there is one; every function must then name it, and touch nothing for it.
// With `lent`, which needs targets, there is a bias too. Plain products are taken with tables of every type.
int run(
    int64_t tokens, int64_t samples, int64_t width, int64_t rows, bool with_targets, int64_t lent, int64_t bad, int64_t missing
) {
    const int64_t extra = with_targets ? 1 : 0, count = samples + extra, gap = 3;
    const auto output = random_floats(tokens * width), table = random_floats((rows - 1) * (width + gap) + width);
    std::unique_ptr<int64_t[]> index(new int64_t[tokens * samples]), targets(new int64_t[tokens]);
    std::uniform_int_distribution<int64_t> any(0, rows - 1);
    for (int64_t i = 0; i < tokens * samples; i++) index[i] = any(generator);
    for (int64_t i = 0; i < tokens; i++) targets[i] = any(generator);
    const bool damaged = bad != 0 && tokens * samples > 0;
    if (damaged) index[tokens * samples - 1] = bad;
    TurbogrSamples p{};
    p.tokens = tokens, p.count = count, p.width = width, p.rows = rows;
    p.output = output.get(), p.output_row = width, p.table = table.get(), p.table_row = width + gap;
    p.targets = with_targets ? targets.get() : nullptr, p.index = index.get(), p.threads = 3;
    const auto bias = random_floats(rows), row_factors = random_floats(rows);
    if (lent > 0) p.bias = bias.get(), p.lent = lent;

    const auto weights = random_floats(tokens * count), own = random_floats(tokens * (count - lent)), factors = random_floats(tokens);
    std::unique_ptr<float[]> logits(new float[tokens * count]()), coefficients(new float[tokens * (count - lent)]());
    std::unique_ptr<float[]> loss(new float[tokens]()), sums(new float[tokens * width]());
    std::unique_ptr<float[]> grads(new float[rows * width - missing]());
    int64_t wrong = -1;
    const auto sound = [&](int code) { return code == (damaged ? 2 : 0) && (!damaged || wrong == tokens * count - 1); };
    if (with_targets) {
        const int code = turbogr_sampled_softmax(&p, 0.05f, loss.get(), coefficients.get(), sums.get(), &wrong);
        if (!sound(code)) return 2;
    }
    if (!finite(loss.get(), tokens) || !finite(coefficients.get(), tokens * (count - lent))) return 3;
    if (!finite(sums.get(), tokens * width)) return 3;
    // Finite numbers in both narrow types.
    const int64_t numbers = (rows - 1) * (width + gap) + width;
    std::unique_ptr<uint16_t[]> half(new uint16_t[numbers]);
    for (int64_t i = 0; i < numbers; i++) half[i] = static_cast<uint16_t>(generator() & 0xbc00);
    for (const int64_t type : {TURBOGR_BFLOAT16, TURBOGR_FLOAT16, TURBOGR_FLOAT32}) {
        p.table_type = type;
        p.table = type == TURBOGR_FLOAT32 ? static_cast<const void*>(table.get()) : half.get();
        p.row_factors = type == TURBOGR_BFLOAT16 ? nullptr : row_factors.get();
        if (!sound(turbogr_negative_logits(&p, logits.get(), &wrong))) return 1;
        if (!sound(turbogr_weighted_rows(&p, weights.get(), sums.get(), &wrong))) return 4;
        if (!finite(logits.get(), tokens * count) || !finite(sums.get(), tokens * width)) return 6;
    }
    // The last sample is not looked at where it is lent.
    const int code = turbogr_row_sums(&p, own.get(), with_targets ? factors.get() : nullptr, grads.get(), &wrong);
    if (lent > 0 ? code != 0 : !sound(code)) return 5;
    return finite(grads.get(), rows * width) ? 0 : 7;
}

}  // namespace

int main(int count, char**) {
    if (count > 1) return run(5, 3, 17, 9, false, 0, 0, 1);
    if (run(3000, 100, 7, 40, false, 0, 0, 0) != 0 || run(3000, 100, 16, 50, true, 0, 0, 0) != 0) return 1;  // several rounds
    int checked = 0;
    for (const int64_t tokens : {0, 1, 7, 100})
        for (const int64_t samples : {0, 1, 15, 16, 17, 40})
            for (const int64_t width : {0, 1, 7, 16, 33, 50, 128, 150})
                for (const int64_t rows : {1, 2, 300, 3000})
                    for (const bool targets : {false, true}) {
                        const std::vector<int64_t> bad = {0, -1, rows, INT64_MIN, INT64_MAX};
                        for (size_t i = 0; i < (width == 7 ? bad.size() : 1); i++) {
                            for (const int64_t lent : std::set<int64_t>{0, targets ? samples / 3 : 0, targets ? samples : 0}) {
                                const int code = run(tokens, samples, width, rows, targets, lent, bad[i], 0);
                                if (code != 0) {
                                    const int t = int(tokens), r = int(samples), d = int(width), u = int(rows);
                                    std::fprintf(stderr, "failed: %d at T %d, R %d, D %d, U %d\n", code, t, r, d, u);
                                    return 1;
                                }
                                checked++;
                            }
                        }
                    }
    std::printf("checked %d problems\n", checked);
    return 0;
}
