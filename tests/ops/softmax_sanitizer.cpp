// Runs the softmax attention kernel over awkward shapes on heap buffers of exact size, so that a sanitizer sees every access
// outside. With an argument, the output buffer is one float short: that must be noticed.

#include "softmax_attention.h"

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <random>
#include <tuple>
#include <vector>

namespace {

std::mt19937 generator(7);

std::unique_ptr<float[]> random_floats(int64_t count, float size) {
    std::normal_distribution<float> normal(0, size);
    std::unique_ptr<float[]> x(new float[count]);
    for (int64_t i = 0; i < count; i++) x[i] = normal(generator);
    return x;
}

bool finite(const float* x, int64_t count) {
    for (int64_t i = 0; i < count; i++)
        if (!std::isfinite(x[i])) return false;
    return true;
}

int run(const std::vector<int64_t>& lengths, int64_t heads, int64_t qk, int64_t v, float size, int64_t missing) {
    std::unique_ptr<int64_t[]> offsets(new int64_t[lengths.size() + 1]{});
    for (size_t b = 0; b < lengths.size(); b++) offsets[b + 1] = offsets[b] + lengths[b];
    const int64_t tokens = offsets[lengths.size()], row = heads * (2 * qk + v);
    const auto packed = random_floats(tokens * row, size);  // q, k, v side by side: strided rows
    const auto incoming = random_floats(tokens * heads * v, 1);
    TurbogrSoftmax p{};
    p.sequences = static_cast<int64_t>(lengths.size()), p.heads = heads, p.qk_width = qk, p.v_width = v;
    p.offsets = offsets.get();
    p.q = packed.get(), p.k = packed.get() + heads * qk, p.v = packed.get() + 2 * heads * qk;
    p.q_row = p.k_row = p.v_row = row, p.q_head = p.k_head = qk, p.v_head = v;
    p.scale = 0.5f, p.threads = 2;

    std::unique_ptr<float[]> out(new float[tokens * heads * v - missing]), log_sums(new float[tokens * heads]);
    const TurbogrSoftmaxResult result{out.get(), heads * v, v, log_sums.get()};
    if (turbogr_softmax_forward(&p, &result) != 0) return 1;
    if (!finite(out.get(), tokens * heads * v) || !finite(log_sums.get(), tokens * heads)) return 1;
    std::unique_ptr<float[]> q(new float[tokens * heads * qk]), k(new float[tokens * heads * qk]), values(new float[tokens * heads * v]);
    TurbogrSoftmaxGradients g{};
    g.out = out.get(), g.log_sums = log_sums.get(), g.incoming = incoming.get();
    g.out_row = g.incoming_row = heads * v, g.out_head = g.incoming_head = v;
    g.q = q.get(), g.k = k.get(), g.v = values.get();
    g.q_row = g.k_row = heads * qk, g.v_row = heads * v, g.q_head = g.k_head = qk, g.v_head = v;
    if (turbogr_softmax_backward(&p, &g) != 0) return 1;
    const bool sound = finite(q.get(), tokens * heads * qk) && finite(k.get(), tokens * heads * qk) &&
                       finite(values.get(), tokens * heads * v);
    return sound ? 0 : 1;
}

}  // namespace

int main(int count, char**) {
    if (count > 1) return run({65, 1}, 1, 8, 5, 1, 1);
    int checked = 0;
    const std::vector<std::vector<int64_t>> batches{{}, {0, 0}, {1}, {2, 63, 64, 65, 0}, {129, 1, 130}, {1, 1, 1, 1, 1}, {300}};
    for (const auto& lengths : batches)
        for (const auto& [heads, qk, v] : std::vector<std::tuple<int64_t, int64_t, int64_t>>{{1, 1, 1}, {2, 16, 17}, {3, 33, 8}, {1, 128, 50}})
            for (const float size : {0.0f, 1.0f, 100.0f}) {  // weights all equal, mixed, and one of each row near 1
                if (run(lengths, heads, qk, v, size, 0) != 0) {
                    std::fprintf(stderr, "failed: %d heads, widths %d and %d\n", int(heads), int(qk), int(v));
                    return 1;
                }
                checked++;
            }
    std::printf("checked %d problems\n", checked);
    return 0;
}
