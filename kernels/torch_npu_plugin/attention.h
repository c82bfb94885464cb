// What HSTU's and FuXi's attention share: their inputs, what is checked of them, and which rows each core computes.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

#include "../ascendc/common/core_assignment.h"
#include "launch.h"

namespace turbogr::npu {

using Table = std::optional<at::Tensor>;
using Gradients = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

// In the order of the operators' schemas.
struct Attention {
    const char* name;
    const at::Tensor &q, &k, &v, &offsets;
    const Table &position_bias, &time, &query_times, &key_times;
    double scale, alpha, time_unit, time_divisor;
    bool functional;  // FuXi: `time` are the numbers of a time function, no table
    std::string_view mask, backend;

    int64_t tokens() const { return q.size(0); }
    int64_t heads() const { return q.size(1); }
    int64_t entries(const Table& table) const { return table.has_value() ? table->numel() : 0; }

    // Whether kernels are asked for and may exist: their tilings have the last word. Where they may not, PyTorch computes the call.
    // Throws ValueError where q, k and v do not go together, so that a tiling may read all their sizes.
    bool for_kernels() const;

    // Throws ValueError for times, offsets and tables that contradict q; waits for the device where offsets are new.
    std::vector<int64_t> checked_offsets() const;
    void check_gradient(const at::Tensor& gradient, int64_t channels) const;
    void check_rows() const;

    // The assignments of blocks to cores, one behind the other, as kernels read them.
    std::vector<int32_t> plan(
        const std::vector<int64_t>& offsets, int64_t cores, std::initializer_list<ascend::BlockOf> kinds) const;
};

// A block of a launch is a cube core with two vector cores.
int64_t attention_cores();

// Tables are read as float32, whatever their dtype; their gradients come as float32 and go back to the table's.
Table as_float(const Table& table);
at::Tensor gradient_of(const Table& table, const at::Tensor& like);
at::Tensor in_dtype_of(const Table& table, const at::Tensor& gradient);

// Where buckets begin; empty where there are none.
std::vector<float> bucket_edges(const Attention& x, int64_t buckets);

// Both directions of an operator whose kernels are told by K: NAME, CHANNELS of the output, BUCKETS of a call, Tiling, `fill`, which
// returns null or why no kernel computes the call, and bytes of the `workspace`. `otherwise` computes what kernels do not.
template <class K, class Otherwise>
at::Tensor attention_forward(const Attention& x, Otherwise otherwise) {
    typename K::Tiling tiling;
    if (!x.for_kernels() || K::fill(tiling, x, attention_cores())) return otherwise();
    const auto plan = x.plan(x.checked_offsets(), tiling.cores, {ascend::BlockOf::QUERIES});
    auto out = at::empty({x.tokens(), x.heads(), K::CHANNELS * x.v.size(2)}, x.v.options());
    Launch launch(K::NAME, x.q);
    launch.tensor(x.q).tensor(x.k).tensor(x.v).numbers(plan).tensor(as_float(x.position_bias)).tensor(as_float(x.time));
    launch.tensor(x.query_times).tensor(x.key_times).numbers(bucket_edges(x, K::buckets(x))).tensor(out);
    launch.run(tiling, K::workspace(tiling, x.q.element_size(), false), tiling.cores / 2);
    return out;
}

template <class K, class Otherwise>
Gradients attention_backward(const at::Tensor& gradient, const Attention& x, Otherwise otherwise) {
    typename K::Tiling tiling;
    if (!x.for_kernels() || K::fill(tiling, x, attention_cores())) return otherwise();
    const auto plan = x.plan(x.checked_offsets(), tiling.cores, {ascend::BlockOf::QUERIES, ascend::BlockOf::KEYS});
    x.check_gradient(gradient, K::CHANNELS);
    const auto like = [](const at::Tensor& t) { return at::empty(t.sizes(), t.options()); };
    const auto grad_q = like(x.q), grad_k = like(x.k), grad_v = like(x.v);
    const auto of_position = gradient_of(x.position_bias, x.q), of_time = gradient_of(x.time, x.q);
    Launch launch(std::string(K::NAME) + "_backward", x.q);
    launch.tensor(gradient).tensor(x.q).tensor(x.k).tensor(x.v).numbers(plan);
    launch.tensor(as_float(x.position_bias)).tensor(as_float(x.time)).tensor(x.query_times).tensor(x.key_times);
    launch.numbers(bucket_edges(x, K::buckets(x)));
    launch.tensor(grad_q).tensor(grad_k).tensor(grad_v).tensor(of_position).tensor(of_time);
    launch.run(tiling, K::workspace(tiling, x.q.element_size(), true), tiling.cores / 2);
    return {grad_q, grad_k, grad_v, in_dtype_of(x.position_bias, of_position), in_dtype_of(x.time, of_time)};
}

}  // namespace turbogr::npu
