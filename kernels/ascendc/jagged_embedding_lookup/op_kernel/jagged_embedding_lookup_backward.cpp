// turbogr::jagged_embedding_lookup, backward: a row's gradient is the sum over the ids that asked for it. The design stands in
// ../README.md.

#include "kernel_operator.h"

#include "../../common/segment_sums.h"
#include "lookup_tables.h"

namespace turbogr::ascend {

template <typename E>
class LookupBackward {
  public:
    __aicore__ inline void init(
        AscendC::TPipe* pipe, const LookupTiling& tiling, GM_ADDR gradient, GM_ADDR order, GM_ADDR starts, GM_ADDR tables,
        GM_ADDR workspace
    ) {
        t_ = tiling;
        tables_.init(tables, t_.tables);
        gradient_.SetGlobalBuffer(reinterpret_cast<__gm__ E*>(gradient), static_cast<uint64_t>(t_.ids * t_.sums.width));
        order_.SetGlobalBuffer(reinterpret_cast<__gm__ int64_t*>(order), static_cast<uint64_t>(t_.ids));
        starts_.init(pipe, starts, t_.rows + 1, t_.sums.numbers);
        sums_.init(pipe, t_.sums, t_.cores, workspace);
    }

    // Table after table, each spread over all cores.
    __aicore__ inline void run() {
        for (int64_t k = 0; k < t_.tables; k++) {
            const LookupTable table = tables_.table(k);
            if (table.address == 0) continue;
            starts_.open(table.first_row);
            sums_.run(summed(table), starts_);
        }
    }

  private:
    __aicore__ inline Summed<E> summed(const LookupTable& table) const {
        Summed<E> s;
        s.source = gradient_;
        s.source_rows = t_.ids;
        s.index = order_;
        s.result = rows_of<E>(table, t_.sums.width);
        s.rows = table.rows;
        return s;
    }

    LookupTiling t_;
    LookupTables tables_;
    AscendC::GlobalTensor<E> gradient_;
    AscendC::GlobalTensor<int64_t> order_;
    ListedStarts starts_;
    SegmentSums<E, false> sums_;
};

template <typename E>
__aicore__ inline void lookup_backward(
    GM_ADDR gradient, GM_ADDR order, GM_ADDR starts, GM_ADDR tables, GM_ADDR workspace, GM_ADDR tiling
) {
    LookupTiling t;
    read_struct(t, tiling);
    AscendC::TPipe pipe;
    LookupBackward<E> kernel;
    kernel.init(&pipe, t, gradient, order, starts, tables, AscendC::GetUserWorkspace(workspace));
    kernel.run();
}

}  // namespace turbogr::ascend

// One entry for each dtype of the gradients. order is int64 [N], starts int64 [rows of all tables + 1]; `tables` is int64 [K, 5],
// LookupTable after LookupTable, with the addresses of the tables' gradients, which are written whole.
#define TURBOGR_LOOKUP_BACKWARD(NAME, TYPE)                                                                        \
    extern "C" __global__ __aicore__ void NAME(                                                                    \
        GM_ADDR gradient, GM_ADDR order, GM_ADDR starts, GM_ADDR tables, GM_ADDR workspace, GM_ADDR tiling         \
    ) {                                                                                                            \
        KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);                                                            \
        turbogr::ascend::lookup_backward<TYPE>(gradient, order, starts, tables, workspace, tiling);                \
    }

TURBOGR_LOOKUP_BACKWARD(jagged_embedding_lookup_backward_float, float)
TURBOGR_LOOKUP_BACKWARD(jagged_embedding_lookup_backward_half, half)
TURBOGR_LOOKUP_BACKWARD(jagged_embedding_lookup_backward_bfloat16, bfloat16_t)
