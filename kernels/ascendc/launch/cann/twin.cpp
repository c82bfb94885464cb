// `make npu-cpu-twin`: some kernels in CANN's CPU twin, against plain loops. It has never run: no machine with CANN was at hand.
//
// A look-up in two tables, forward and backward, and negative logits forward, in float32: what a first try with CANN is to show is
// that the sources compile, launch and come back with the right numbers. Attention, which needs the cube, is checked on the NPU
// (`python -m tests.ascendc.on_device`).
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "acl/acl.h"

#include "../../jagged_embedding_lookup/op_host/jagged_embedding_lookup_tiling.h"
#include "../../negative_logits/op_host/negative_logits_tiling.h"

using namespace turbogr::ascend;

extern "C" {
uint32_t turbogr_platform(int64_t* numbers);
uint32_t turbogr_launch_jagged_embedding_lookup_float(uint32_t, void*, void* const*);
uint32_t turbogr_launch_jagged_embedding_lookup_backward_float(uint32_t, void*, void* const*);
uint32_t turbogr_launch_negative_logits_float(uint32_t, void*, void* const*);
}

namespace {

constexpr int64_t CORES = 4, WIDTH = 40;
int64_t system_workspace = 0;
int wrong = 0;

void must(int code, const char* what) {
    if (code == 0) return;
    std::fprintf(stderr, "%s gave %d\n", what, code);
    std::exit(2);
}

void* space(int64_t bytes) {
    void* data = nullptr;
    must(aclrtMalloc(&data, static_cast<size_t>(bytes + 512), ACL_MEM_MALLOC_HUGE_FIRST), "aclrtMalloc");
    return data;
}

template <class T>
void* sent(const std::vector<T>& values) {
    const size_t bytes = values.size() * sizeof(T);
    void* const data = space(static_cast<int64_t>(bytes));
    must(aclrtMemcpy(data, bytes, values.data(), bytes, ACL_MEMCPY_HOST_TO_DEVICE), "aclrtMemcpy");
    return data;
}

std::vector<float> fetched(const void* data, int64_t count) {
    std::vector<float> values(static_cast<size_t>(count));
    const size_t bytes = values.size() * sizeof(float);
    must(aclrtMemcpy(values.data(), bytes, data, bytes, ACL_MEMCPY_DEVICE_TO_HOST), "aclrtMemcpy");
    return values;
}

std::vector<float> numbers(int64_t count) {
    static uint32_t state = 1;
    std::vector<float> values;
    for (int64_t i = 0; i < count; i++) {
        state = state * 1664525u + 1013904223u;
        values.push_back(static_cast<float>(state >> 8) / (1 << 24) - 0.5f);
    }
    return values;
}

void compare(const char* name, const std::vector<float>& actual, const std::vector<float>& expected) {
    double largest = 0;
    for (size_t i = 0; i < expected.size(); i++) largest = std::fmax(largest, std::fabs(actual[i] - expected[i]));
    const bool right = largest < 1e-4;  // a NaN is wrong: fmax drops it, so it is looked for
    bool finite = true;
    for (const float x : actual) finite = finite && std::isfinite(x);
    std::printf("%s %s: largest difference %.1e\n", right && finite ? "ok   " : "WRONG", name, largest);
    wrong += !(right && finite);
}

template <class Tiling>
void launch(
    uint32_t (*entry)(uint32_t, void*, void* const*), aclrtStream stream, std::vector<void*> arguments, const Tiling& tiling,
    int64_t workspace, const char* name) {
    arguments.push_back(space(system_workspace + workspace));
    arguments.push_back(sent(std::vector<Tiling>{tiling}));
    must(static_cast<int>(entry(CORES, stream, arguments.data())), name);
    must(aclrtSynchronizeStream(stream), "aclrtSynchronizeStream");
}

void look_up(aclrtStream stream) {
    const std::vector<int64_t> rows{50, 9}, ids{3, 3, 49, 0, 8, 8, 2, 8}, cuts{0, 4, 8};
    const std::vector<std::vector<float>> tables{numbers(rows[0] * WIDTH), numbers(rows[1] * WIDTH)};
    const auto gradient = numbers(static_cast<int64_t>(ids.size()) * WIDTH);
    std::vector<float> expected;
    std::vector<std::vector<float>> sums{std::vector<float>(tables[0].size()), std::vector<float>(tables[1].size())};
    std::vector<int64_t> list, gradients, order, starts{0};
    std::vector<void*> results;
    int64_t before = 0;
    for (size_t k = 0; k < 2; k++) {
        results.push_back(space(rows[k] * WIDTH * 4));
        const LookupTable table{reinterpret_cast<int64_t>(sent(tables[k])), rows[k], cuts[k], cuts[k + 1], before};
        list.insert(list.end(), {table.address, table.rows, table.begin, table.end, table.first_row});
        gradients.insert(gradients.end(), {reinterpret_cast<int64_t>(results[k]), table.rows, table.begin, table.end, before});
        before += rows[k];
        for (int64_t i = cuts[k]; i < cuts[k + 1]; i++)
            for (int64_t d = 0; d < WIDTH; d++) {
                const int64_t at = ids[static_cast<size_t>(i)] * WIDTH + d;
                expected.push_back(tables[k][static_cast<size_t>(at)]);
                sums[k][static_cast<size_t>(at)] += gradient[static_cast<size_t>(i * WIDTH + d)];
            }
        for (int64_t row = 0; row < rows[k]; row++) {
            for (int64_t i = cuts[k]; i < cuts[k + 1]; i++)
                if (ids[static_cast<size_t>(i)] == row) order.push_back(i);
            starts.push_back(static_cast<int64_t>(order.size()));
        }
    }
    LookupTiling tiling;
    if (const char* error = lookup_tiling(tiling, {2, static_cast<int64_t>(ids.size()), before, WIDTH, 4, CORES})) {
        std::fprintf(stderr, "%s\n", error);
        std::exit(2);
    }
    void* const out = space(static_cast<int64_t>(expected.size()) * 4);
    launch(
        turbogr_launch_jagged_embedding_lookup_float, stream, {sent(list), sent(ids), out}, tiling,
        lookup_workspace_bytes(tiling, false), "jagged_embedding_lookup");
    compare("jagged_embedding_lookup", fetched(out, static_cast<int64_t>(expected.size())), expected);
    launch(
        turbogr_launch_jagged_embedding_lookup_backward_float, stream, {sent(gradient), sent(order), sent(starts), sent(gradients)},
        tiling, lookup_workspace_bytes(tiling, true), "jagged_embedding_lookup_backward");
    for (size_t k = 0; k < 2; k++) compare("jagged_embedding_lookup_backward", fetched(results[k], rows[k] * WIDTH), sums[k]);
}

void negatives(aclrtStream stream) {
    constexpr int64_t TOKENS = 5, SAMPLES = 7, ROWS = 11;
    const auto output = numbers(TOKENS * WIDTH), rows = numbers(ROWS * WIDTH);
    std::vector<int64_t> index;
    std::vector<float> expected;
    for (int64_t i = 0; i < TOKENS * SAMPLES; i++) {
        index.push_back(i * 5 % ROWS);
        double sum = 0;
        for (int64_t d = 0; d < WIDTH; d++)
            sum += double{output[static_cast<size_t>(i / SAMPLES * WIDTH + d)]} * rows[static_cast<size_t>(index.back() * WIDTH + d)];
        expected.push_back(static_cast<float>(sum));
    }
    NegativeTiling tiling;
    if (const char* error = negative_tiling(tiling, {TOKENS, SAMPLES, ROWS, WIDTH, 4, CORES})) {
        std::fprintf(stderr, "%s\n", error);
        std::exit(2);
    }
    void* const logits = space(TOKENS * SAMPLES * 4);
    launch(
        turbogr_launch_negative_logits_float, stream, {sent(output), sent(rows), sent(index), logits}, tiling,
        negative_workspace_bytes(tiling, false), "negative_logits");
    compare("negative_logits", fetched(logits, TOKENS * SAMPLES), expected);
}

}  // namespace

int main() {
    must(aclInit(nullptr), "aclInit");
    must(aclrtSetDevice(0), "aclrtSetDevice");
    aclrtStream stream = nullptr;
    must(aclrtCreateStream(&stream), "aclrtCreateStream");
    int64_t platform[3] = {};
    must(static_cast<int>(turbogr_platform(platform)), "turbogr_platform");
    system_workspace = platform[2];
    look_up(stream);
    negatives(stream);
    must(aclrtDestroyStream(stream), "aclrtDestroyStream");
    must(aclrtResetDevice(0), "aclrtResetDevice");
    must(aclFinalize(), "aclFinalize");
    return wrong > 0;
}
