// What the drivers of FuXi's attention have in common: the host's part of a launch.
#pragma once

#include <stdexcept>
#include <vector>

#include "common/bucket_edges.h"
#include "common/core_assignment.h"
#include "jagged_fuxi_attention/op_host/jagged_fuxi_attention_tiling.h"

#include "host_numbers.h"

namespace driver {

using namespace turbogr::ascend;

constexpr int64_t FLOAT = 0, HALF = 1, BFLOAT16 = 2;

// As tests/ascendc/fuxi.py fills it. time_parameters are the table, or the numbers of the time function.
struct Problem {
    int64_t dtype, tokens, sequences, heads, qk_width, v_width, position_count, time_kind, time_count, cores, seed;
    double scale, alpha, time_unit, time_divisor;
    void *q, *k, *v;
    int64_t* offsets;
    float *position_bias, *time_parameters;
    int64_t *query_times, *key_times, *thresholds;

    int64_t bytes() const { return dtype == FLOAT ? 4 : 2; }
    int64_t time_parameter_bytes() const { return (time_kind == TIME_FUNCTION ? FUNCTION_NUMBERS : time_count) * 4; }
    FuxiTiling tiling() const {
        FuxiTiling t;
        const FuxiShapes shapes{tokens, heads, qk_width, v_width, bytes(), position_count, time_kind, time_count, cores};
        const char* error = fuxi_tiling(t, shapes, {scale, alpha, time_unit, time_divisor});
        if (error != nullptr) throw std::invalid_argument(error);
        return t;
    }
    std::vector<int32_t> plan(bool backward) const {
        std::vector<int32_t> plan = assign_row_blocks(BlockOf::QUERIES, offsets, sequences, cores).packed();
        if (!backward) return plan;
        const std::vector<int32_t> keys = assign_row_blocks(BlockOf::KEYS, offsets, sequences, cores).packed();
        plan.insert(plan.end(), keys.begin(), keys.end());
        return plan;
    }
    std::vector<float> edges() const {
        if (time_kind != TIME_TABLE) return {};
        return bucket_edges(std::vector<int64_t>(thresholds, thresholds + time_count - 1));
    }
};

inline GM_ADDR address(void* pointer) { return static_cast<GM_ADDR>(pointer); }

// Inputs as the kernel sees them: registered, and what the host adds.
class Inputs {
  public:
    const FuxiTiling tiling;
    const HostNumbers tiling_bytes, plan, edges;
    const host::Workspace workspace;

    Inputs(const Problem& p, bool backward)
        : tiling(p.tiling()), tiling_bytes(&tiling, sizeof tiling), plan(p.plan(backward)), edges(p.edges()),
          workspace(fuxi_workspace_bytes(tiling, p.bytes(), backward)) {
        const int64_t rows = p.tokens * p.heads * p.bytes(), times = p.time_kind == NO_TIME ? 0 : p.tokens * 8;
        add(p.q, rows * p.qk_width);
        add(p.k, rows * p.qk_width);
        add(p.v, rows * p.v_width);
        add(p.position_bias, p.position_count * 4);
        add(p.time_parameters, p.time_parameter_bytes());
        add(p.query_times, times);
        if (p.key_times != p.query_times) add(p.key_times, times);
    }
    Inputs(const Inputs&) = delete;

  private:
    void add(const void* pointer, int64_t bytes) { registered_.push_back(host::global(pointer, bytes)); }

    std::vector<host::Allocation> registered_;
};

// Calls the kernel of the dtype; `call` has a kernel as its argument.
template <class Call, class Float, class Half, class Bfloat16>
host::Counters launch(const Problem& p, Call call, Float of_float, Half of_half, Bfloat16 of_bfloat16) {
    const host::Options options{p.seed};
    if (p.dtype == FLOAT) return host::launch(p.cores, [&] { call(of_float); }, options);
    if (p.dtype == HALF) return host::launch(p.cores, [&] { call(of_half); }, options);
    return host::launch(p.cores, [&] { call(of_bfloat16); }, options);
}

}  // namespace driver
