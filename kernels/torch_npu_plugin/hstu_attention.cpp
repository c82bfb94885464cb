// turbogr::jagged_hstu_attention on NPUs.
#include <torch/library.h>

#include "../ascendc/jagged_hstu_attention/op_host/jagged_hstu_attention_tiling.h"
#include "attention.h"
#include "fallback.h"

namespace turbogr::npu {

namespace {

constexpr auto FORWARD = "turbogr::jagged_hstu_attention", BACKWARD = "turbogr::jagged_hstu_attention_backward";

struct Hstu {
    using Tiling = ascend::HstuTiling;
    static constexpr auto NAME = "jagged_hstu_attention";
    static constexpr int64_t CHANNELS = 1;

    static int64_t buckets(const Attention& x) { return x.entries(x.time); }
    static const char* fill(Tiling& tiling, const Attention& x, int64_t cores) {
        const ascend::HstuShapes shapes{x.tokens(),         x.heads(),                  x.q.size(2),       x.v.size(2),
                                        x.q.element_size(), x.entries(x.position_bias), x.entries(x.time), cores};
        return ascend::hstu_tiling(tiling, shapes, {x.scale, x.alpha, x.time_unit, x.time_divisor});
    }
    static int64_t workspace(const Tiling& tiling, int64_t element_bytes, bool backward) {
        return ascend::hstu_workspace_bytes(tiling, element_bytes, backward);
    }
};

at::Tensor forward(
    const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& offsets, const Table& position_bias,
    const Table& time_bias, const Table& query_times, const Table& key_times, double scale, double alpha, double time_unit,
    double time_divisor, c10::string_view mask, c10::string_view backend, c10::string_view products) {
    const Attention x{FORWARD,   q,     k,     v,         offsets,      position_bias, time_bias, query_times,
                      key_times, scale, alpha, time_unit, time_divisor, false,         mask,      backend};
    return attention_forward<Hstu>(x, [&] {
        return in_pytorch<decltype(forward)>(
            FORWARD, q, k, v, offsets, position_bias, time_bias, query_times, key_times, scale, alpha, time_unit, time_divisor, mask,
            backend, products);
    });
}

Gradients backward(
    const at::Tensor& gradient, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& offsets,
    const Table& position_bias, const Table& time_bias, const Table& query_times, const Table& key_times, double scale, double alpha,
    double time_unit, double time_divisor, c10::string_view mask, c10::string_view backend, c10::string_view products) {
    const Attention x{BACKWARD,  q,     k,     v,         offsets,      position_bias, time_bias, query_times,
                      key_times, scale, alpha, time_unit, time_divisor, false,         mask,      backend};
    return attention_backward<Hstu>(gradient, x, [&] {
        return in_pytorch<decltype(backward)>(
            BACKWARD, gradient, q, k, v, offsets, position_bias, time_bias, query_times, key_times, scale, alpha, time_unit,
            time_divisor, mask, backend, products);
    });
}

TORCH_LIBRARY_IMPL(turbogr, PrivateUse1, m) {
    m.impl(FORWARD, TORCH_FN(forward));
    m.impl(BACKWARD, TORCH_FN(backward));
}

}  // namespace

}  // namespace turbogr::npu
