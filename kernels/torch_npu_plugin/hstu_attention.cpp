// turbogr::jagged_hstu_attention on NPUs.
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include "../ascendc/common/bucket_edges.h"
#include "../ascendc/jagged_hstu_attention/op_host/jagged_hstu_attention_tiling.h"
#include "attention.h"
#include "fallback.h"
#include "kernel_library.h"
#include "launch.h"

namespace turbogr::npu {

namespace {

constexpr auto NAME = "jagged_hstu_attention";
constexpr auto FORWARD = "turbogr::jagged_hstu_attention", BACKWARD = "turbogr::jagged_hstu_attention_backward";

// A block of a launch is a cube core with two vector cores.
int64_t vector_cores() { return 2 * platform().cube_cores; }

// Null, or why no kernel computes this call.
const char* fill(ascend::HstuTiling& tiling, const Attention& x) {
    const ascend::HstuShapes shapes{
        x.tokens(), x.heads(), x.q.size(2), x.v.size(2), x.q.element_size(), x.entries(x.position_bias), x.entries(x.time),
        vector_cores()};
    return ascend::hstu_tiling(tiling, shapes, {x.scale, x.alpha, x.time_unit, x.time_divisor});
}

std::vector<float> edges(const Attention& x) {
    if (!x.time.has_value()) return {};
    return ascend::bucket_edges(ascend::bucket_thresholds(x.entries(x.time), x.time_unit, x.time_divisor));
}

at::Tensor forward(
    const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& offsets, const Table& position_bias,
    const Table& time_bias, const Table& query_times, const Table& key_times, double scale, double alpha, double time_unit,
    double time_divisor, c10::string_view mask, c10::string_view backend, c10::string_view products) {
    const Attention x{FORWARD,   q,     k,     v,         offsets,      position_bias, time_bias, query_times,
                      key_times, scale, alpha, time_unit, time_divisor, mask,          backend};
    ascend::HstuTiling tiling;
    if (!x.for_kernels() || fill(tiling, x))
        return in_pytorch<decltype(forward)>(
            FORWARD, q, k, v, offsets, position_bias, time_bias, query_times, key_times, scale, alpha, time_unit, time_divisor, mask,
            backend, products);
    const auto plan = x.plan(x.checked_offsets(), tiling.cores, {ascend::BlockOf::QUERIES});
    auto out = at::empty_like(v, at::MemoryFormat::Contiguous);
    Launch(NAME, q)
        .tensor(q).tensor(k).tensor(v).numbers(plan).tensor(as_float(position_bias)).tensor(as_float(time_bias))
        .tensor(query_times).tensor(key_times).numbers(edges(x)).tensor(out)
        .run(tiling, ascend::hstu_workspace_bytes(tiling, q.element_size(), false), tiling.cores / 2);
    return out;
}

Gradients backward(
    const at::Tensor& gradient, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& offsets,
    const Table& position_bias, const Table& time_bias, const Table& query_times, const Table& key_times, double scale, double alpha,
    double time_unit, double time_divisor, c10::string_view mask, c10::string_view backend, c10::string_view products) {
    const Attention x{BACKWARD,  q,     k,     v,         offsets,      position_bias, time_bias, query_times,
                      key_times, scale, alpha, time_unit, time_divisor, mask,          backend};
    ascend::HstuTiling tiling;
    if (!x.for_kernels() || fill(tiling, x))
        return in_pytorch<decltype(backward)>(
            BACKWARD, gradient, q, k, v, offsets, position_bias, time_bias, query_times, key_times, scale, alpha, time_unit,
            time_divisor, mask, backend, products);
    const auto plan = x.plan(x.checked_offsets(), tiling.cores, {ascend::BlockOf::QUERIES, ascend::BlockOf::KEYS});
    TORCH_CHECK_VALUE(
        gradient.sizes() == v.sizes() && gradient.scalar_type() == v.scalar_type(), BACKWARD, ": the gradient is ", v.scalar_type(),
        " ", v.sizes(), "; got ", gradient.scalar_type(), " ", gradient.sizes());
    auto grad_q = at::empty_like(q, at::MemoryFormat::Contiguous), grad_k = at::empty_like(k, at::MemoryFormat::Contiguous);
    auto grad_v = at::empty_like(v, at::MemoryFormat::Contiguous);
    auto of_position = gradient_of(position_bias, q), of_time = gradient_of(time_bias, q);
    Launch(std::string(NAME) + "_backward", q)
        .tensor(gradient).tensor(q).tensor(k).tensor(v).numbers(plan).tensor(as_float(position_bias)).tensor(as_float(time_bias))
        .tensor(query_times).tensor(key_times).numbers(edges(x))
        .tensor(grad_q).tensor(grad_k).tensor(grad_v).tensor(of_position).tensor(of_time)
        .run(tiling, ascend::hstu_workspace_bytes(tiling, q.element_size(), true), tiling.cores / 2);
    return {grad_q, grad_k, grad_v, in_dtype_of(position_bias, of_position), in_dtype_of(time_bias, of_time)};
}

TORCH_LIBRARY_IMPL(turbogr, PrivateUse1, m) {
    m.impl(FORWARD, TORCH_FN(forward));
    m.impl(BACKWARD, TORCH_FN(backward));
}

}  // namespace

}  // namespace turbogr::npu
