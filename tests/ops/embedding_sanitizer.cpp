// Runs the embedding kernels over awkward shapes on heap buffers of exact size, so that a sanitizer sees every access outside, and
// checks sums. With an argument, the output is one float short: that must be noticed.

#include "embedding.h"

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <random>
#include <vector>

namespace {

std::mt19937_64 generator(7);

std::unique_ptr<float[]> random_floats(int64_t count) {
    std::uniform_real_distribution<float> uniform(0.5f, 1.5f);
    std::unique_ptr<float[]> x(new float[count]);
    for (int64_t i = 0; i < count; i++) x[i] = uniform(generator);
    return x;
}

double total(const float* x, int64_t count) {
    double sum = 0;
    for (int64_t i = 0; i < count; i++) sum += x[i];
    return sum;
}

bool near(double a, double b) { return std::abs(a - b) <= 1e-4 * (std::abs(a) + std::abs(b) + 1); }

bool lookups(int64_t count, int64_t rows, int64_t width, int64_t missing) {
    constexpr int64_t TABLES = 3;  // the second one has no ids and no rows, the third has `rows`
    const int64_t sizes[TABLES] = {7, 0, rows}, splits[TABLES + 1] = {0, count / 3, count / 3, count};
    std::unique_ptr<float[]> weights[TABLES], grads[TABLES];
    const float* weight_pointers[TABLES];
    float* grad_pointers[TABLES];
    for (int64_t k = 0; k < TABLES; k++) {
        weights[k] = random_floats(sizes[k] * width), grads[k] = random_floats(sizes[k] * width);
        weight_pointers[k] = weights[k].get(), grad_pointers[k] = k == 0 ? nullptr : grads[k].get();
    }
    const int64_t strides[TABLES] = {width, width, width};
    const std::unique_ptr<int64_t[]> ids(new int64_t[count]);
    for (int64_t i = 0; i < count; i++) ids[i] = static_cast<int64_t>(generator() % static_cast<uint64_t>(i < splits[1] ? 7 : rows));
    if (count > 9000) std::fill_n(ids.get() + splits[1], 5000, 0);  // a row that is summed in pieces
    const std::unique_ptr<float[]> out(new float[count * width - missing]);
    const auto gradient = random_floats(count * width);
    TurbogrLookup p{TABLES, width, weight_pointers, sizes, strides, ids.get(), splits, 2};
    if (turbogr_lookup_forward(&p, out.get(), width) != -1) return false;
    for (int64_t i = 0; i < count * width; i++)
        if (out[i] != weights[i / width < splits[1] ? 0 : 2][ids[i / width] * width + i % width]) return false;
    if (turbogr_lookup_backward(&p, gradient.get(), width, grad_pointers) != -1) return false;
    if (!near(total(grads[2].get(), rows * width), total(gradient.get() + splits[1] * width, (count - splits[1]) * width))) return false;
    if (count == splits[1]) return true;
    const int64_t wrong = count - 1;
    for (const int64_t bad : {int64_t{-1}, INT64_MIN, rows, INT64_MAX}) {
        ids[wrong] = bad;
        if (turbogr_lookup_forward(&p, out.get(), width) != wrong) return false;
        if (turbogr_lookup_backward(&p, gradient.get(), width, grad_pointers) != wrong) return false;
    }
    return true;
}

bool updates(int64_t count, int64_t width, int64_t rule, bool summed) {
    const int64_t table = 3 * count + 1, positions = summed ? 3 * count + (count > 0 ? 9000 : 0) : count;
    const auto weight = random_floats(table * width), gradient = random_floats(positions * width);
    const int64_t first_width = rule == 0 ? 0 : rule == 2 ? 1 : width, second_width = rule == 3 ? width : 0;
    const auto first = random_floats(table * first_width), second = random_floats(table * second_width);
    const std::unique_ptr<int64_t[]> rows(new int64_t[count]), order(new int64_t[positions]), starts(new int64_t[count + 1]{});
    for (int64_t u = 0; u < count; u++) rows[u] = 3 * (count - u), starts[u + 1] = u == 0 ? 9000 : starts[u] + 3;
    if (count > 0) starts[count] = positions;
    for (int64_t i = 0; i < positions; i++) order[i] = positions - 1 - i;
    TurbogrRowUpdate p{};
    p.rule = rule, p.num_rows = table, p.width = width, p.weight = weight.get(), p.weight_stride = width;
    p.first = rule > 0 ? first.get() : nullptr, p.first_stride = first_width;
    p.second = rule == 3 ? second.get() : nullptr, p.second_stride = second_width;
    p.count = count, p.rows = rows.get(), p.gradient = gradient.get(), p.gradient_stride = width;
    if (summed) p.order = order.get(), p.starts = starts.get();
    p.lr = 0.1, p.eps = 1e-8, p.beta1 = 0.9, p.beta2 = 0.98, p.weight_decay = 0.1, p.correction = 0.5, p.threads = 2;
    const double before = total(weight.get(), table * width);
    if (turbogr_row_update(&p) != -1) return false;
    const double after = total(weight.get(), table * width);
    if (rule == 0 && !near(before - after, 0.1 * total(gradient.get(), positions * width))) return false;
    if (count == 0) return true;
    rows[count - 1] = table;
    return turbogr_row_update(&p) == count - 1 && total(weight.get(), table * width) == after;
}

}  // namespace

int main(int count, char**) {
    if (count > 1) return lookups(100, 50, 33, 1) ? 0 : 1;
    int checked = 0;
    for (const int64_t width : {1, 2, 15, 16, 17, 50, 128}) {
        for (const int64_t ids : {0, 1, 2, 63, 64, 65, 3000, 20000})
            for (const int64_t rows : {1, 5, 3000}) {
                if (!lookups(ids, rows, width, 0)) return std::fprintf(stderr, "look-up of %d, width %d\n", int(ids), int(width)), 1;
                checked++;
            }
        for (const int64_t rows : {0, 1, 2, 1000})
            for (const int64_t rule : {0, 1, 2, 3})
                for (const bool summed : {false, true}) {
                    if (!updates(rows, width, rule, summed))
                        return std::fprintf(stderr, "update of %d rows, width %d, rule %d\n", int(rows), int(width), int(rule)), 1;
                    checked++;
                }
    }
    std::printf("checked %d problems\n", checked);
    return 0;
}
