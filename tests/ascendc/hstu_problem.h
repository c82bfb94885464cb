// What the drivers of HSTU attention have in common: the host's part of a launch.
#pragma once

#include <cstring>
#include <stdexcept>
#include <vector>

#include "common/bucket_edges.h"
#include "common/core_assignment.h"
#include "jagged_hstu_attention/op_host/jagged_hstu_attention_tiling.h"

namespace driver {

using namespace turbogr::ascend;

constexpr int64_t FLOAT = 0, HALF = 1, BFLOAT16 = 2;

// As tests/ascendc/test_hstu_attention.py fills it.
struct Problem {
    int64_t dtype, tokens, sequences, heads, qk_width, v_width, position_count, time_count, cores, seed;
    double scale, alpha, time_unit, time_divisor;
    void *q, *k, *v;
    int64_t* offsets;
    float *position_bias, *time_bias;
    int64_t *query_times, *key_times, *thresholds;

    int64_t bytes() const { return dtype == FLOAT ? 4 : 2; }
    HstuShapes shapes() const { return {tokens, heads, qk_width, v_width, bytes(), position_count, time_count, cores}; }
    HstuTiling tiling() const {
        HstuTiling t;
        const char* error = hstu_tiling(t, shapes(), {scale, alpha, time_unit, time_divisor});
        if (error != nullptr) throw std::invalid_argument(error);
        return t;
    }
    std::vector<int32_t> plan(BlockOf kind) const { return assign_row_blocks(kind, offsets, sequences, cores).packed(); }
    std::vector<float> edges() const {
        if (time_count == 0) return {};
        return bucket_edges(std::vector<int64_t>(thresholds, thresholds + time_count - 1));
    }
};

// Inputs as the kernel sees them: registered, and the numbers that the host adds.
struct Inputs {
    HstuTiling tiling;
    std::vector<int32_t> plan;
    std::vector<float> edges;
    std::vector<host::Allocation> registered;

    Inputs(const Problem& p, bool backward) : tiling(p.tiling()), plan(p.plan(BlockOf::QUERIES)), edges(p.edges()) {
        if (backward) {
            const std::vector<int32_t> keys = p.plan(BlockOf::KEYS);
            plan.insert(plan.end(), keys.begin(), keys.end());
        }
        const int64_t rows = p.tokens * p.heads * p.bytes();
        add(p.q, rows * p.qk_width);
        add(p.k, rows * p.qk_width);
        add(p.v, rows * p.v_width);
        add(p.position_bias, p.position_count * 4);
        add(p.time_bias, p.time_count * 4);
        add(p.query_times, p.time_count > 0 ? p.tokens * 8 : 0);
        if (p.key_times != p.query_times) add(p.key_times, p.time_count > 0 ? p.tokens * 8 : 0);
        add(&tiling, sizeof tiling);
        add(plan.data(), static_cast<int64_t>(plan.size() * 4));
        add(edges.data(), static_cast<int64_t>(edges.size() * 4));
    }
    Inputs(const Inputs&) = delete;

    GM_ADDR tiling_address() { return reinterpret_cast<GM_ADDR>(&tiling); }
    GM_ADDR plan_address() { return reinterpret_cast<GM_ADDR>(plan.data()); }
    GM_ADDR edges_address() { return reinterpret_cast<GM_ADDR>(edges.data()); }

  private:
    void add(const void* pointer, int64_t bytes) { registered.push_back(host::global(pointer, bytes)); }
};

inline GM_ADDR address(void* pointer) { return static_cast<GM_ADDR>(pointer); }

}  // namespace driver
