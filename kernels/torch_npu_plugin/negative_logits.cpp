// turbogr::negative_logits on NPUs. Indices are not looked at: nobody waits for the device.
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/searchsorted.h>
#include <ATen/ops/sort.h>
#include <torch/library.h>

#include <optional>
#include <tuple>

#include "../ascendc/negative_logits/op_host/negative_logits_tiling.h"
#include "fallback.h"
#include "kernel_library.h"
#include "launch.h"

namespace turbogr::npu {

namespace {

constexpr auto FORWARD = "turbogr::negative_logits", BACKWARD = "turbogr::negative_logits_backward";

using Factors = std::optional<at::Tensor>;

// Whether a kernel computes the call; fills its tiling. Rows in another dtype, with factors, are PyTorch's.
bool for_kernel(
    ascend::NegativeTiling& tiling, const at::Tensor& output, const at::Tensor& rows, const at::Tensor& index, const Factors& factors,
    c10::string_view backend) {
    TORCH_CHECK_VALUE(
        output.dim() == 2 && rows.dim() == 2 && output.size(1) == rows.size(1), FORWARD,
        ": output [T, D] and rows [U, D] share D; got ", output.sizes(), " and ", rows.sizes());
    TORCH_CHECK_VALUE(
        index.dim() == 2 && index.size(0) == output.size(0) && index.scalar_type() == at::kLong, FORWARD,
        ": index is int64 [T, R]; got ", index.scalar_type(), " ", index.sizes());
    if (backend != "auto" || factors.has_value() || rows.scalar_type() != output.scalar_type() || index.numel() == 0 ||
        !has_kernels(output.scalar_type()))
        return false;
    const ascend::NegativeShapes shapes{
        output.size(0), index.size(1), rows.size(0), output.size(1), output.element_size(), platform().vector_cores};
    return ascend::negative_tiling(tiling, shapes) == nullptr;
}

at::Tensor forward(
    const at::Tensor& output, const at::Tensor& rows, const at::Tensor& index, const Factors& factors, c10::string_view backend) {
    ascend::NegativeTiling tiling;
    if (!for_kernel(tiling, output, rows, index, factors, backend))
        return in_pytorch<decltype(forward)>(FORWARD, output, rows, index, factors, backend);
    const auto logits = at::empty(index.sizes(), output.options());
    Launch("negative_logits", output)
        .tensor(output).tensor(rows).tensor(index).tensor(logits)
        .run(tiling, ascend::negative_workspace_bytes(tiling, false), tiling.cores);
    return logits;
}

std::tuple<at::Tensor, at::Tensor> backward(
    const at::Tensor& gradient, const at::Tensor& output, const at::Tensor& rows, const at::Tensor& index, const Factors& factors,
    bool both, c10::string_view backend) {
    ascend::NegativeTiling tiling;
    // The kernel computes both gradients.
    if (!both || !for_kernel(tiling, output, rows, index, factors, backend))
        return in_pytorch<decltype(backward)>(BACKWARD, gradient, output, rows, index, factors, both, backend);
    TORCH_CHECK_VALUE(
        gradient.sizes() == index.sizes() && gradient.scalar_type() == output.scalar_type(), BACKWARD, ": the gradient is ",
        output.scalar_type(), " ", index.sizes(), "; got ", gradient.scalar_type(), " ", gradient.sizes());
    const auto dtype = rows.size(0) < INT32_MAX ? at::kInt : at::kLong;  // narrow numbers sort faster
    const auto [ordered, order] = at::sort(index.reshape(-1).to(dtype), /*stable=*/true, /*dim=*/0, /*descending=*/false);
    const auto starts = at::searchsorted(ordered, at::arange(rows.size(0) + 1, ordered.options()));
    const auto weights = gradient.reshape(-1).index_select(0, order);
    const auto tokens = order.div(index.size(1), "floor");
    const auto grad_output = at::empty(output.sizes(), output.options()), grad_rows = at::empty(rows.sizes(), rows.options());
    Launch("negative_logits_backward", output)
        .tensor(gradient).tensor(output).tensor(rows).tensor(index).tensor(tokens).tensor(weights).tensor(starts)
        .tensor(grad_output).tensor(grad_rows)
        .run(tiling, ascend::negative_workspace_bytes(tiling, true), tiling.cores);
    return {grad_output, grad_rows};
}

TORCH_LIBRARY_IMPL(turbogr, PrivateUse1, m) {
    m.impl(FORWARD, TORCH_FN(forward));
    m.impl(BACKWARD, TORCH_FN(backward));
}

}  // namespace

}  // namespace turbogr::npu
