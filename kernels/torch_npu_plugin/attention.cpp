#include "attention.h"

#include <algorithm>

#include "../ascendc/common/bucket_edges.h"
#include "host_offsets.h"
#include "kernel_library.h"

namespace turbogr::npu {

bool Attention::for_kernels() const {
    if (backend != "auto" || mask != "causal" || !has_kernels(q.scalar_type())) return false;
    check_rows();
    return tokens() > 0;
}

void Attention::check_rows() const {
    TORCH_CHECK_VALUE(
        q.dim() == 3 && k.sizes() == q.sizes() && v.dim() == 3 && v.size(0) == tokens() && v.size(1) == heads(), name,
        ": q and k are [T, H, dqk] and v is [T, H, dv]; got q ", q.sizes(), ", k ", k.sizes(), ", v ", v.sizes());
    TORCH_CHECK_VALUE(
        k.scalar_type() == q.scalar_type() && v.scalar_type() == q.scalar_type(), name, ": q, k and v share one dtype; got ",
        q.scalar_type(), ", ", k.scalar_type(), ", ", v.scalar_type());
}

std::vector<int64_t> Attention::checked_offsets() const {
    for (const Table* times : {&query_times, &key_times})
        TORCH_CHECK_VALUE(
            !time.has_value() || (times->has_value() && (*times)->numel() == tokens() && (*times)->scalar_type() == at::kLong),
            name, ": times are int64 [", tokens(), "] where there is a time channel");
    TORCH_CHECK_VALUE(
        offsets.dim() == 1 && offsets.numel() > 0 && offsets.scalar_type() == at::kLong, name, ": offsets are int64 [B + 1]; got ",
        offsets.scalar_type(), " ", offsets.sizes());
    auto values = *on_host(offsets);
    TORCH_CHECK_VALUE(
        values.front() == 0 && values.back() == tokens() && std::is_sorted(values.begin(), values.end()), name,
        ": offsets rise from 0 to ", tokens(), "; got first ", values.front(), ", last ", values.back(), ", or a fall between");
    int64_t longest = 0;
    for (size_t i = 1; i < values.size(); i++) longest = std::max(longest, values[i] - values[i - 1]);
    TORCH_CHECK_VALUE(
        !position_bias.has_value() || longest <= position_bias->numel(), name, ": position_bias has ", entries(position_bias),
        " entries, the longest sequence ", longest, " tokens");
    return values;
}

void Attention::check_gradient(const at::Tensor& gradient, int64_t channels) const {
    const std::vector<int64_t> shape{tokens(), heads(), channels * v.size(2)};
    TORCH_CHECK_VALUE(
        gradient.sizes() == c10::IntArrayRef(shape) && gradient.scalar_type() == v.scalar_type(), name, ": the gradient is ",
        v.scalar_type(), " ", shape, "; got ", gradient.scalar_type(), " ", gradient.sizes());
}

std::vector<int32_t> Attention::plan(
    const std::vector<int64_t>& offsets, int64_t cores, std::initializer_list<ascend::BlockOf> kinds) const {
    std::vector<int32_t> all;
    for (const auto kind : kinds) {
        const auto assigned =
            ascend::assign_row_blocks(kind, offsets.data(), static_cast<int64_t>(offsets.size()) - 1, cores).packed();
        all.insert(all.end(), assigned.begin(), assigned.end());
    }
    return all;
}

int64_t attention_cores() { return 2 * platform().cube_cores; }

Table as_float(const Table& table) { return table.has_value() ? Table(table->to(at::kFloat)) : table; }

at::Tensor gradient_of(const Table& table, const at::Tensor& like) {
    return at::empty({table.has_value() ? table->numel() : 0}, like.options().dtype(at::kFloat));
}

at::Tensor in_dtype_of(const Table& table, const at::Tensor& gradient) {
    return table.has_value() ? gradient.to(table->scalar_type()) : gradient;
}

std::vector<float> bucket_edges(const Attention& x, int64_t buckets) {
    if (buckets == 0) return {};
    return ascend::bucket_edges(ascend::bucket_thresholds(buckets, x.time_unit, x.time_divisor));
}

}  // namespace turbogr::npu
