// turbogr::jagged_embedding_lookup, forward. The formula stands in turbogr/ops/embedding_lookup.py, the design in ../README.md.

#include "kernel_operator.h"

#include "../../common/row_stream.h"
#include "lookup_tables.h"

namespace turbogr::ascend {

template <typename E>
class LookupForward {
  public:
    __aicore__ inline void init(
        AscendC::TPipe* pipe, const LookupTiling& tiling, GM_ADDR tables, GM_ADDR ids, GM_ADDR out
    ) {
        t_ = tiling;
        tables_.init(tables, t_.tables);
        all_ids_.SetGlobalBuffer(reinterpret_cast<__gm__ int64_t*>(ids), static_cast<uint64_t>(t_.ids));
        out_.SetGlobalBuffer(reinterpret_cast<__gm__ E*>(out), static_cast<uint64_t>(t_.ids * t_.sums.width));
        ids_.init(pipe, t_.numbers);
        pipe->InitBuffer(blocks_, 2, static_cast<uint32_t>(t_.block_rows * t_.sums.pitch * sizeof(E)));
    }

    // Table after table, each spread over all cores: at any time all of them read the same one.
    __aicore__ inline void run() {
        for (int64_t k = 0; k < t_.tables; k++) {
            const LookupTable table = tables_.table(k);
            const Part part = even_part(table.begin, table.end, t_.cores, AscendC::GetBlockIdx());
            const auto rows = rows_of<E>(table, t_.sums.width);
            ids_.open(all_ids_, part.end);
            for (int64_t i = part.begin; i < part.end; i += t_.block_rows) {
                copy(rows, table.rows, i, smaller(t_.block_rows, part.end - i));
            }
        }
    }

  private:
    // Rows go through local memory without a stop at the vector unit: while one block is written, the next is fetched.
    __aicore__ inline void copy(const AscendC::GlobalTensor<E>& table, int64_t rows, int64_t first, int64_t count) {
        const int64_t width = t_.sums.width, pitch = t_.sums.pitch;
        auto block = blocks_.template AllocTensor<E>();
        RowBlocks<E, 2>::fetch(block, pitch, table, ids_, first, count, width, rows);
        blocks_.EnQue(block);
        block = blocks_.template DeQue<E>();
        store_rows(out_[first * width], width, block, pitch, count, width);
        blocks_.FreeTensor(block);
    }

    LookupTiling t_;
    LookupTables tables_;
    AscendC::GlobalTensor<int64_t> all_ids_;
    AscendC::GlobalTensor<E> out_;
    Numbers<int64_t> ids_;
    AscendC::TQueBind<AscendC::TPosition::VECIN, AscendC::TPosition::VECOUT, 2> blocks_;
};

template <typename E>
__aicore__ inline void lookup_forward(GM_ADDR tables, GM_ADDR ids, GM_ADDR out, GM_ADDR tiling) {
    LookupTiling t;
    read_struct(t, tiling);
    AscendC::TPipe pipe;
    LookupForward<E> kernel;
    kernel.init(&pipe, t, tables, ids, out);
    kernel.run();
}

}  // namespace turbogr::ascend

// One entry for each dtype of tables and out. `tables` is int64 [K, 5], LookupTable after LookupTable; ids are int64 [N].
#define TURBOGR_LOOKUP_FORWARD(NAME, TYPE)                                                                             \
    extern "C" __global__ __aicore__ void NAME(                                                                        \
        GM_ADDR tables, GM_ADDR ids, GM_ADDR out, GM_ADDR workspace, GM_ADDR tiling                                    \
    ) {                                                                                                                \
        KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);                                                                \
        (void)workspace;                                                                                               \
        turbogr::ascend::lookup_forward<TYPE>(tables, ids, out, tiling);                                               \
    }

TURBOGR_LOOKUP_FORWARD(jagged_embedding_lookup_float, float)
TURBOGR_LOOKUP_FORWARD(jagged_embedding_lookup_half, half)
TURBOGR_LOOKUP_FORWARD(jagged_embedding_lookup_bfloat16, bfloat16_t)
