// Kernel side: the list of tables that the host wrote to global memory.
#pragma once

#include "kernel_operator.h"

#include "../op_host/jagged_embedding_lookup_tiling.h"

namespace turbogr::ascend {

class LookupTables {
  public:
    __aicore__ inline void init(GM_ADDR tables, int64_t count) {
        all_.SetGlobalBuffer(reinterpret_cast<__gm__ int64_t*>(tables), static_cast<uint64_t>(count * LOOKUP_TABLE_NUMBERS));
    }
    __aicore__ inline LookupTable table(int64_t k) const {
        const uint64_t first = static_cast<uint64_t>(k * LOOKUP_TABLE_NUMBERS);
        return {
            all_.GetValue(first), all_.GetValue(first + 1), all_.GetValue(first + 2), all_.GetValue(first + 3),
            all_.GetValue(first + 4)};
    }

  private:
    AscendC::GlobalTensor<int64_t> all_;
};

// The table's rows, or those of its gradient.
template <typename E>
__aicore__ inline AscendC::GlobalTensor<E> rows_of(const LookupTable& table, int64_t width) {
    AscendC::GlobalTensor<E> rows;
    rows.SetGlobalBuffer(reinterpret_cast<__gm__ E*>(table.address), static_cast<uint64_t>(table.rows * width));
    return rows;
}

}  // namespace turbogr::ascend
