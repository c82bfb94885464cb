// Runs the HSTU kernel over awkward shapes on heap buffers of exact size, so that a sanitizer sees every access outside.
// With an argument, the output buffer is one element short: that must be noticed.

#include "hstu_attention.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

namespace {

std::mt19937 generator(7);

using BFloat16 = uint16_t;

float to_float(float x) { return x; }
float to_float(BFloat16 bits) {
    const uint32_t word = uint32_t{bits} << 16;
    float x;
    std::memcpy(&x, &word, sizeof x);
    return x;
}

void assign(float& to, float x) { to = x; }
void assign(BFloat16& to, float x) {
    uint32_t word;
    std::memcpy(&word, &x, sizeof word);
    to = static_cast<BFloat16>(word >> 16);
}

template <typename Element>
std::unique_ptr<Element[]> random_numbers(int64_t count) {
    std::normal_distribution<float> normal;
    std::unique_ptr<Element[]> x(new Element[count]);
    for (int64_t i = 0; i < count; i++) assign(x[i], normal(generator));
    return x;
}

template <typename Element>
bool finite(const Element* x, int64_t count) {
    for (int64_t i = 0; i < count; i++)
        if (!std::isfinite(to_float(x[i]))) return false;
    return true;
}

// `ordered` times rise, and no query is before its own key.
template <typename Element>
int run(const std::vector<int64_t>& lengths, int64_t heads, int64_t qk, int64_t v, int64_t buckets, int64_t gap, bool ordered, bool bfloat16_products, int64_t missing) {
    std::unique_ptr<int64_t[]> offsets(new int64_t[lengths.size() + 1]{});
    int64_t longest = 0;
    for (size_t b = 0; b < lengths.size(); b++) {
        offsets[b + 1] = offsets[b] + lengths[b];
        longest = lengths[b] > longest ? lengths[b] : longest;
    }
    const int64_t tokens = offsets[lengths.size()];
    const auto packed = random_numbers<Element>(tokens * heads * (2 * qk + v));  // q, k, v side by side: strided rows
    const auto position = random_numbers<float>(longest), time = random_numbers<float>(buckets);
    const auto incoming = random_numbers<Element>(tokens * heads * v);
    std::unique_ptr<int64_t[]> queries(new int64_t[tokens]), keys(new int64_t[tokens]), thresholds(new int64_t[buckets]);
    std::uniform_int_distribution<int64_t> any(-gap, gap);
    for (int64_t i = 0; i < tokens; i++) queries[i] = any(generator), keys[i] = any(generator);
    if (ordered) {
        std::sort(keys.get(), keys.get() + tokens);
        for (int64_t i = 0; i < tokens; i++) queries[i] = i + 1 < tokens ? keys[i + 1] : keys[i];
    }
    const int64_t known = buckets > 0 ? buckets - 1 : 0;
    std::unique_ptr<int64_t[]> exact(new int64_t[known]);
    for (int64_t b = 0; b < known; b++) {
        const double edge = std::ceil(std::exp(0.301 * static_cast<double>(b + 1)));
        exact[b] = edge < 9e18 ? static_cast<int64_t>(edge) : INT64_MAX;
    }
    const int64_t row = heads * (2 * qk + v);
    TurbogrHstu p{};
    p.sequences = static_cast<int64_t>(lengths.size()), p.heads = heads, p.qk_width = qk, p.v_width = v;
    p.offsets = offsets.get(), p.bfloat16 = sizeof(Element) == 2;
    p.q = packed.get(), p.k = packed.get() + heads * qk, p.v = packed.get() + 2 * heads * qk;
    p.q_row = p.k_row = p.v_row = row, p.q_head = p.k_head = qk, p.v_head = v;
    p.bias.position_bias = buckets % 2 == 0 ? position.get() : nullptr;
    p.bias.time_bias = buckets > 0 ? time.get() : nullptr;
    p.bias.time_count = buckets, p.bias.thresholds = exact.get();
    p.bias.query_times = queries.get(), p.bias.key_times = keys.get();
    p.bias.time_unit = 1, p.bias.time_divisor = 0.301, p.scale = 0.1f, p.alpha = 0.5f, p.threads = 2;
    p.bfloat16_products = bfloat16_products;

    std::unique_ptr<Element[]> out(new Element[tokens * heads * v - missing]);
    if (turbogr_hstu_forward(&p, out.get(), heads * v, v) != 0 || !finite(out.get(), tokens * heads * v)) return 1;
    std::unique_ptr<Element[]> q(new Element[tokens * heads * qk]), k(new Element[tokens * heads * qk]), values(new Element[tokens * heads * v]);
    std::unique_ptr<float[]> by_distance(new float[longest]), by_bucket(new float[buckets]);
    TurbogrHstuGradients g{};
    g.out = incoming.get(), g.out_row = heads * v, g.out_head = v;
    g.q = q.get(), g.k = k.get(), g.v = values.get();
    g.q_row = g.k_row = heads * qk, g.v_row = heads * v, g.q_head = g.k_head = qk, g.v_head = v;
    g.position_bias = by_distance.get(), g.position_count = p.bias.position_bias == nullptr ? 0 : longest, g.time_bias = by_bucket.get();
    if (turbogr_hstu_backward(&p, &g) != 0) return 1;
    const bool sound = finite(q.get(), tokens * heads * qk) && finite(k.get(), tokens * heads * qk) &&
                       finite(values.get(), tokens * heads * v) && finite(by_distance.get(), g.position_count) &&
                       finite(by_bucket.get(), buckets);
    return sound ? 0 : 1;
}

}  // namespace

int main(int count, char**) {
    if (count > 1) return run<float>({65, 1}, 1, 8, 5, 4, 1000, false, false, 1);
    int checked = 0;
    const std::vector<std::vector<int64_t>> batches{{}, {0, 0}, {1}, {2, 63, 64, 65, 0}, {129, 1, 130}, {1, 1, 1, 1, 1}, {300}};
    for (const auto& lengths : batches)
        for (const auto& [heads, qk, v] : std::vector<std::tuple<int64_t, int64_t, int64_t>>{{1, 1, 1}, {2, 16, 17}, {3, 33, 8}, {1, 128, 50}})
            for (const int64_t buckets : {0, 1, 2, 33, 128})
                for (const int64_t gap : {int64_t{0}, int64_t{1} << 20, INT64_MAX}) {
                    const bool ordered = (checked & 1) != 0, half = (checked & 2) != 0, products = (checked & 4) != 0;
                    if ((half ? run<BFloat16> : run<float>)(lengths, heads, qk, v, buckets, gap, ordered, products, 0) != 0) {
                        std::fprintf(stderr, "failed: %d heads, widths %d and %d\n", int(heads), int(qk), int(v));
                        return 1;
                    }
                    checked++;
                }
    std::printf("checked %d problems\n", checked);
    return 0;
}
