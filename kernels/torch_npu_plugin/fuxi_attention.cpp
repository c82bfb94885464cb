// turbogr::jagged_fuxi_attention on NPUs.
#include <torch/library.h>

#include "../ascendc/jagged_fuxi_attention/op_host/jagged_fuxi_attention_tiling.h"
#include "attention.h"
#include "fallback.h"

namespace turbogr::npu {

namespace {

constexpr auto FORWARD = "turbogr::jagged_fuxi_attention", BACKWARD = "turbogr::jagged_fuxi_attention_backward";

struct Fuxi {
    using Tiling = ascend::FuxiTiling;
    static constexpr auto NAME = "jagged_fuxi_attention";
    static constexpr int64_t CHANNELS = ascend::FUXI_CHANNELS;

    static int64_t buckets(const Attention& x) { return x.functional ? 0 : x.entries(x.time); }
    static const char* fill(Tiling& tiling, const Attention& x, int64_t cores) {
        if (x.functional && x.entries(x.time) != ascend::FUNCTION_NUMBERS) return "a time function has three numbers";
        const auto time = !x.time.has_value() ? ascend::NO_TIME : x.functional ? ascend::TIME_FUNCTION : ascend::TIME_TABLE;
        const ascend::FuxiShapes shapes{
            x.tokens(),         x.heads(),                  x.q.size(2), x.v.size(2),
            x.q.element_size(), x.entries(x.position_bias), time,        buckets(x), cores};
        return ascend::fuxi_tiling(tiling, shapes, {x.scale, x.alpha, x.time_unit, x.time_divisor});
    }
    static int64_t workspace(const Tiling& tiling, int64_t element_bytes, bool backward) {
        return ascend::fuxi_workspace_bytes(tiling, element_bytes, backward);
    }
};

at::Tensor forward(
    const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& offsets, const Table& position_bias,
    const Table& time_parameters, const Table& query_times, const Table& key_times, double scale, double alpha, double time_unit,
    double time_divisor, bool functional, c10::string_view mask, c10::string_view backend) {
    const Attention x{FORWARD,   q,     k,     v,         offsets,      position_bias, time_parameters, query_times,
                      key_times, scale, alpha, time_unit, time_divisor, functional,    mask,            backend};
    return attention_forward<Fuxi>(x, [&] {
        return in_pytorch<decltype(forward)>(
            FORWARD, q, k, v, offsets, position_bias, time_parameters, query_times, key_times, scale, alpha, time_unit, time_divisor,
            functional, mask, backend);
    });
}

Gradients backward(
    const at::Tensor& gradient, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& offsets,
    const Table& position_bias, const Table& time_parameters, const Table& query_times, const Table& key_times, double scale,
    double alpha, double time_unit, double time_divisor, bool functional, c10::string_view mask, c10::string_view backend) {
    const Attention x{BACKWARD,  q,     k,     v,         offsets,      position_bias, time_parameters, query_times,
                      key_times, scale, alpha, time_unit, time_divisor, functional,    mask,            backend};
    return attention_backward<Fuxi>(gradient, x, [&] {
        return in_pytorch<decltype(backward)>(
            BACKWARD, gradient, q, k, v, offsets, position_bias, time_parameters, query_times, key_times, scale, alpha, time_unit,
            time_divisor, functional, mask, backend);
    });
}

TORCH_LIBRARY_IMPL(turbogr, PrivateUse1, m) {
    m.impl(FORWARD, TORCH_FN(forward));
    m.impl(BACKWARD, TORCH_FN(backward));
}

}  // namespace

}  // namespace turbogr::npu
