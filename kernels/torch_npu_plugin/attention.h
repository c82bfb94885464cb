// What HSTU's and FuXi's attention share: their inputs, what is checked of them, and which rows each core computes.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string_view>
#include <tuple>
#include <vector>

#include "../ascendc/common/core_assignment.h"

namespace turbogr::npu {

using Table = std::optional<at::Tensor>;
using Gradients = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

// In the order of the operators' schemas.
struct Attention {
    const char* name;
    const at::Tensor &q, &k, &v, &offsets;
    const Table &position_bias, &time, &query_times, &key_times;
    double scale, alpha, time_unit, time_divisor;
    std::string_view mask, backend;

    int64_t tokens() const { return q.size(0); }
    int64_t heads() const { return q.size(1); }
    int64_t entries(const Table& table) const { return table.has_value() ? table->numel() : 0; }

    // Whether kernels are asked for and may exist: their tilings have the last word. Where they may not, PyTorch computes the call.
    bool for_kernels() const;

    // Throws ValueError for shapes and values that contradict each other; waits for the device where offsets are new.
    std::vector<int64_t> checked_offsets() const;

    // The assignments of blocks to cores, one behind the other, as kernels read them.
    std::vector<int32_t> plan(
        const std::vector<int64_t>& offsets, int64_t cores, std::initializer_list<ascend::BlockOf> kinds) const;
};

// Tables are read as float32, whatever their dtype; their gradients come as float32 and go back to the table's.
Table as_float(const Table& table);
at::Tensor gradient_of(const Table& table, const at::Tensor& like);
at::Tensor in_dtype_of(const Table& table, const at::Tensor& gradient);

}  // namespace turbogr::npu
