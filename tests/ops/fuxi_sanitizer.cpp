// Runs the FuXi kernel over awkward shapes on heap buffers of exact size, so that a sanitizer sees every access outside.
// With an argument, the output buffer is one float short: that must be noticed.

#include "fuxi_attention.h"

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <random>
#include <tuple>
#include <vector>

namespace {

std::mt19937 generator(7);

template <typename T>
std::unique_ptr<T[]> buffer(int64_t count) {
    return std::unique_ptr<T[]>(new T[count]);
}

std::unique_ptr<float[]> random_floats(int64_t count) {
    std::normal_distribution<float> normal;
    auto x = buffer<float>(count);
    for (int64_t i = 0; i < count; i++) x[i] = normal(generator);
    return x;
}

template <typename T>
bool finite(const T* x, int64_t count) {
    for (int64_t i = 0; i < count; i++)
        if (!std::isfinite(x[i])) return false;
    return true;
}

// `buckets` > 0: a table of so many; -1: the time function; 0: no time channel.
int run(const std::vector<int64_t>& lengths, int64_t heads, int64_t qk, int64_t v, int64_t buckets, int64_t gap, int64_t missing) {
    const auto offsets = buffer<int64_t>(static_cast<int64_t>(lengths.size()) + 1);
    int64_t longest = 0;
    offsets[0] = 0;
    for (size_t b = 0; b < lengths.size(); b++) {
        offsets[b + 1] = offsets[b] + lengths[b];
        longest = lengths[b] > longest ? lengths[b] : longest;
    }
    const int64_t tokens = offsets[lengths.size()], known = buckets > 1 ? buckets - 1 : 0;
    const auto packed = random_floats(tokens * heads * (2 * qk + v));  // q, k, v side by side: strided rows
    const auto position = random_floats(longest), table = random_floats(known + 1);
    const auto incoming = random_floats(tokens * heads * 3 * v);
    const auto queries = buffer<int64_t>(tokens), keys = buffer<int64_t>(tokens), thresholds = buffer<int64_t>(known);
    std::uniform_int_distribution<int64_t> any(-gap, gap);
    for (int64_t i = 0; i < tokens; i++) queries[i] = any(generator), keys[i] = any(generator);
    for (int64_t b = 0; b < known; b++) {
        const double edge = std::ceil(std::exp(0.301 * static_cast<double>(b + 1)));
        thresholds[b] = edge < 9e18 ? static_cast<int64_t>(edge) : INT64_MAX;
    }
    const double numbers[3] = {0.1, 0.9, 0.7};
    const int64_t row = heads * (2 * qk + v);
    TurbogrFuxi p{};
    p.sequences = static_cast<int64_t>(lengths.size()), p.heads = heads, p.qk_width = qk, p.v_width = v;
    p.offsets = offsets.get();
    p.q = packed.get(), p.k = packed.get() + heads * qk, p.v = packed.get() + 2 * heads * qk;
    p.q_row = p.k_row = p.v_row = row, p.q_head = p.k_head = qk, p.v_head = v;
    p.bias.position_bias = buckets % 2 == 0 ? position.get() : nullptr;
    p.bias.time_bias = buckets > 0 ? table.get() : nullptr;
    p.bias.time_count = buckets > 0 ? buckets : 0, p.bias.thresholds = thresholds.get();
    p.bias.query_times = queries.get(), p.bias.key_times = keys.get();
    p.bias.time_unit = 1, p.bias.time_divisor = 0.301;
    p.time_function = buckets < 0 ? numbers : nullptr;
    p.scale = 0.1f, p.alpha = 0.5f, p.threads = 2;

    const auto out = buffer<float>(tokens * heads * 3 * v - missing);
    if (turbogr_fuxi_forward(&p, out.get(), heads * 3 * v, 3 * v) != 0 || !finite(out.get(), tokens * heads * 3 * v)) return 1;
    const int64_t distances = p.bias.position_bias == nullptr ? 0 : longest;
    const auto q = buffer<float>(tokens * heads * qk), k = buffer<float>(tokens * heads * qk), values = buffer<float>(tokens * heads * v);
    const auto by_distance = buffer<float>(distances), by_bucket = buffer<float>(p.bias.time_count);
    double by_number[3] = {0, 0, 0};
    TurbogrFuxiGradients g{};
    g.out = incoming.get(), g.out_row = heads * 3 * v, g.out_head = 3 * v;
    g.q = q.get(), g.k = k.get(), g.v = values.get();
    g.q_row = g.k_row = heads * qk, g.v_row = heads * v, g.q_head = g.k_head = qk, g.v_head = v;
    g.position_bias = by_distance.get(), g.position_count = distances, g.time_bias = by_bucket.get();
    g.time_function = buckets < 0 ? by_number : nullptr;
    if (turbogr_fuxi_backward(&p, &g) != 0) return 1;
    const bool sound = finite(q.get(), tokens * heads * qk) && finite(k.get(), tokens * heads * qk) &&
                       finite(values.get(), tokens * heads * v) && finite(by_distance.get(), distances) &&
                       finite(by_bucket.get(), p.bias.time_count) && finite(by_number, 3);
    return sound ? 0 : 1;
}

}  // namespace

int main(int count, char**) {
    if (count > 1) return run({65, 1}, 1, 8, 5, 4, 1000, 1);
    int checked = 0;
    const std::vector<std::vector<int64_t>> batches{{}, {0, 0}, {1}, {2, 63, 64, 65, 0}, {129, 1, 130}, {1, 1, 1, 1, 1}, {300}};
    const std::vector<std::tuple<int64_t, int64_t, int64_t>> widths{{1, 1, 1}, {2, 16, 17}, {3, 33, 8}, {1, 128, 50}};
    for (const auto& lengths : batches)
        for (const auto& [heads, qk, v] : widths)
            for (const int64_t buckets : {-1, 0, 1, 2, 33, 128})
                for (const int64_t gap : {int64_t{0}, int64_t{1} << 20, INT64_MAX}) {
                    if (run(lengths, heads, qk, v, buckets, gap, 0) != 0) {
                        std::fprintf(stderr, "failed: %d heads, widths %d and %d\n", int(heads), int(qk), int(v));
                        return 1;
                    }
                    checked++;
                }
    std::printf("checked %d problems\n", checked);
    return 0;
}
