// Kernel side: what kernels of attention are given: rows of heads, and the blocks of rows that a core works on.
#pragma once

#include "kernel_operator.h"

#include "products.h"
#include "row_block.h"

namespace turbogr::ascend {

// [tokens, heads, width]
template <typename T>
struct Heads {
    AscendC::GlobalTensor<T> data;
    int64_t width, row;

    __aicore__ inline void init(GM_ADDR begin, int64_t tokens, int64_t heads, int64_t of_width) {
        width = of_width;
        row = heads * of_width;
        data.SetGlobalBuffer(reinterpret_cast<__gm__ T*>(begin), static_cast<uint64_t>(tokens * row));
    }
    // From a token's row on.
    __aicore__ inline Matrix<T> at(int64_t token, int64_t h) const {
        return {data[token * row + h * width], row};
    }
};

// The row blocks of a core in a packed plan (core_assignment.h).
class Plan {
  public:
    __aicore__ inline void init(const AscendC::GlobalTensor<int32_t>& plan, int64_t cores, int64_t core) {
        plan_ = plan;
        begin_ = plan_.GetValue(static_cast<uint64_t>(core));
        end_ = plan_.GetValue(static_cast<uint64_t>(core + 1));
        first_ = cores + 1;
    }
    __aicore__ inline int64_t begin() const { return begin_; }
    __aicore__ inline int64_t end() const { return end_; }
    __aicore__ inline RowBlock block(int64_t i) const {
        const auto at = static_cast<uint64_t>(first_ + i * ROW_BLOCK_INTS);
        return {plan_.GetValue(at), plan_.GetValue(at + 1), plan_.GetValue(at + 2)};
    }

  private:
    AscendC::GlobalTensor<int32_t> plan_;
    int64_t begin_, end_, first_;
};

}  // namespace turbogr::ascend
