// turbogr::jagged_embedding_lookup on NPUs.
//
// Values of ids are not looked at here: a look-up waits for nobody. One outside its table stops the forward kernel; a backward
// comes behind its forward, and sorts whatever it is given.
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/searchsorted.h>
#include <ATen/ops/sort.h>
#include <torch/library.h>

#include <algorithm>
#include <optional>

#include "../ascendc/jagged_embedding_lookup/op_host/jagged_embedding_lookup_tiling.h"
#include "fallback.h"
#include "host_offsets.h"
#include "kernel_library.h"
#include "launch.h"

namespace turbogr::npu {

namespace {

constexpr auto FORWARD = "turbogr::jagged_embedding_lookup", OUT = "turbogr::jagged_embedding_lookup_out",
               BACKWARD = "turbogr::jagged_embedding_lookup_backward";

using Splits = std::optional<at::Tensor>;

std::vector<int64_t> edges(const Splits& splits, int64_t ids, int64_t tables) {
    auto values = splits.has_value() ? *on_host(*splits) : std::vector<int64_t>{0, ids};
    TORCH_CHECK_VALUE(
        static_cast<int64_t>(values.size()) == tables + 1 && values.front() == 0 && values.back() == ids &&
            std::is_sorted(values.begin(), values.end()),
        FORWARD, ": splits rise from 0 to ", ids, " for ", tables, " tables; got ", values);
    return values;
}

void check_ids(const char* name, const at::Tensor& ids, c10::Device device) {
    TORCH_CHECK_VALUE(
        ids.dim() == 1 && ids.scalar_type() == at::kLong && ids.device() == device, name, ": ids are int64 [N] on ", device, "; got ",
        ids.scalar_type(), " ", ids.sizes(), " on ", ids.device());
}

// Tables, or gradients, as kernels read them; addresses come later.
std::vector<int64_t> list_of(const std::vector<int64_t>& edges, const std::vector<int64_t>& rows, const std::vector<at::Tensor>& all) {
    std::vector<int64_t> numbers;
    int64_t before = 0;
    for (size_t k = 0; k < rows.size(); k++) {
        const auto address = all[k].defined() ? reinterpret_cast<int64_t>(all[k].data_ptr()) : 0;
        const ascend::LookupTable table{address, rows[k], edges[k], edges[k + 1], before};
        numbers.insert(numbers.end(), {table.address, table.rows, table.begin, table.end, table.first_row});
        before += rows[k];
    }
    return numbers;
}

const char* fill(ascend::LookupTiling& tiling, const at::Tensor& like, int64_t ids, const std::vector<int64_t>& rows) {
    int64_t all = 0;
    for (const auto count : rows) all += count;
    const ascend::LookupShapes shapes{
        static_cast<int64_t>(rows.size()), ids, all, like.size(1), like.element_size(), platform().vector_cores};
    return ascend::lookup_tiling(tiling, shapes);
}

// Writes the rows to `out`, or returns false: no kernel computes this call.
bool written(at::TensorList tables, const at::Tensor& ids, const Splits& splits, const at::Tensor& out, c10::string_view backend) {
    TORCH_CHECK_VALUE(!tables.empty(), FORWARD, ": there is no table");
    const auto& first = tables[0];
    if (backend != "auto" || !has_kernels(first.scalar_type()) || ids.numel() == 0 || !out.is_contiguous()) return false;
    check_ids(FORWARD, ids, first.device());
    std::vector<at::Tensor> rows;
    std::vector<int64_t> counts;
    for (const auto& table : tables) {
        TORCH_CHECK_VALUE(
            table.dim() == 2 && table.size(1) == first.size(1) && table.scalar_type() == first.scalar_type() &&
                table.device() == first.device(),
            FORWARD, ": tables are [V, D] of one dtype, device and D; got ", table.scalar_type(), " ", table.sizes(), " on ",
            table.device());
        rows.push_back(table.contiguous());
        counts.push_back(table.size(0));
    }
    ascend::LookupTiling tiling;
    if (fill(tiling, first, ids.numel(), counts)) return false;
    const auto list = list_of(edges(splits, ids.numel(), static_cast<int64_t>(rows.size())), counts, rows);
    Launch("jagged_embedding_lookup", first)
        .numbers(list).tensor(ids).tensor(out).keep(rows)
        .run(tiling, ascend::lookup_workspace_bytes(tiling, false), tiling.cores);
    return true;
}

at::Tensor forward(at::TensorList tables, const at::Tensor& ids, const Splits& splits, c10::string_view backend) {
    TORCH_CHECK_VALUE(!tables.empty() && tables[0].dim() == 2, FORWARD, ": tables are [V, D]");
    const auto out = at::empty({ids.numel(), tables[0].size(1)}, tables[0].options());
    if (written(tables, ids, splits, out, backend)) return out;
    return in_pytorch<decltype(forward)>(FORWARD, tables, ids, splits, backend);
}

void forward_out(at::TensorList tables, const at::Tensor& ids, const Splits& splits, at::Tensor& out, c10::string_view backend) {
    if (!written(tables, ids, splits, out, backend)) in_pytorch<decltype(forward_out)>(OUT, tables, ids, splits, out, backend);
}

std::vector<at::Tensor> backward(
    const at::Tensor& gradient, const at::Tensor& ids, const Splits& splits, at::IntArrayRef num_rows, c10::List<bool> wanted,
    c10::string_view backend) {
    const std::vector<int64_t> counts(num_rows.begin(), num_rows.end());
    const auto otherwise = [&] { return in_pytorch<decltype(backward)>(BACKWARD, gradient, ids, splits, num_rows, wanted, backend); };
    if (backend != "auto" || !has_kernels(gradient.scalar_type()) || ids.numel() == 0) return otherwise();
    check_ids(BACKWARD, ids, gradient.device());
    TORCH_CHECK_VALUE(
        gradient.dim() == 2 && gradient.size(0) == ids.numel() && wanted.size() == counts.size(), BACKWARD, ": the gradient is [",
        ids.numel(), ", D] and each table is wanted or not; got ", gradient.sizes(), " and ", wanted.size(), " for ", counts.size());
    ascend::LookupTiling tiling;
    if (fill(tiling, gradient, ids.numel(), counts) || tiling.rows == 0) return otherwise();
    const auto cuts = edges(splits, ids.numel(), static_cast<int64_t>(counts.size()));

    // Each table's rows behind those of the tables before it, so that one sort serves all; stable: sums are in the batch's order.
    std::vector<at::Tensor> grads, of_kernel, places;
    int64_t before = 0;
    for (size_t k = 0; k < counts.size(); k++) {
        grads.push_back(at::empty({wanted.get(k) ? counts[k] : 0, gradient.size(1)}, gradient.options()));
        of_kernel.push_back(wanted.get(k) ? grads.back() : at::Tensor());
        places.push_back(ids.slice(0, cuts[k], cuts[k + 1]).add(before));
        before += counts[k];
    }
    const auto dtype = tiling.rows < INT32_MAX ? at::kInt : at::kLong;  // narrow numbers sort faster
    const auto [ordered, order] = at::sort(at::cat(places).to(dtype), /*stable=*/true, /*dim=*/0, /*descending=*/false);
    const auto starts = at::searchsorted(ordered, at::arange(tiling.rows + 1, ordered.options()));
    Launch("jagged_embedding_lookup_backward", gradient)
        .tensor(gradient).tensor(order).tensor(starts).numbers(list_of(cuts, counts, of_kernel)).keep(grads)
        .run(tiling, ascend::lookup_workspace_bytes(tiling, true), tiling.cores);
    return grads;
}

TORCH_LIBRARY_IMPL(turbogr, PrivateUse1, m) {
    m.impl(FORWARD, TORCH_FN(forward));
    m.impl(OUT, TORCH_FN(forward_out));
    m.impl(BACKWARD, TORCH_FN(backward));
}

}  // namespace

}  // namespace turbogr::npu
