// Kernel side: the gradients of a position and a time table, from every core's own sums. Between writing these and adding them up
// all cores meet in SyncAll. A table's entries are summed over cores in their order: the result depends on how many cores there
// are, but not on which comes first.
#pragma once

#include "kernel_operator.h"

#include "align.h"
#include "pair_tables.h"
#include "strips.h"

namespace turbogr::ascend {

// The sums of cores in global memory, float32 `stride` numbers apart.
struct PartialSums {
    GM_ADDR first;
    int64_t stride, cores;
};

// Adds up and stores `count` numbers, BLOCK partial sums each, times a factor; pieces of them are dealt out to the cores.
template <int64_t BLOCK, class In, class Out>
__aicore__ inline void add_up(
    GM_ADDR to, const PartialSums& partial, int64_t count, float factor, int64_t core, In& in, Out& out,
    const AscendC::LocalTensor<float>& sum, int64_t most
) {
    using namespace AscendC;
    static_assert(BLOCK == 1 || BLOCK == PARTIAL_SUMS);
    GlobalTensor<float> total, sums;
    total.SetGlobalBuffer(reinterpret_cast<__gm__ float*>(to), static_cast<uint64_t>(count));
    const int64_t piece = most / BLOCK;
    for (int64_t i = core; i * piece < count; i += partial.cores) {
        const int64_t first = i * piece, n = smaller(piece, count - first);
        Duplicate(sum, 0.0f, static_cast<int32_t>(most));
        for (int64_t c = 0; c < partial.cores; c++) {
            auto* of_core = reinterpret_cast<__gm__ float*>(partial.first) + c * partial.stride;
            sums.SetGlobalBuffer(of_core, static_cast<uint64_t>(count * BLOCK));
            LocalTensor<float> x = in.template AllocTensor<float>();
            load_rows(x, round_up(n * BLOCK, PARTIAL_SUMS), sums[first * BLOCK], 0, 1, n * BLOCK);
            in.EnQue(x);
            x = in.template DeQue<float>();
            Add(sum, sum, x, static_cast<int32_t>(round_up(n * BLOCK, PARTIAL_SUMS)));
            in.FreeTensor(x);
        }
        LocalTensor<float> y = out.template AllocTensor<float>();
        const int32_t padded = static_cast<int32_t>(round_up(n, PARTIAL_SUMS));
        if constexpr (BLOCK == 1) {
            Muls(y, sum, factor, padded);
        } else {
            constexpr int64_t repeat = VECTOR_BYTES / 4;
            BlockReduceSum(y, sum, static_cast<int32_t>(ceil_divide(n * BLOCK, repeat)), static_cast<int32_t>(repeat), 1, 1, 8);
            Muls(y, y, factor, padded);
        }
        out.EnQue(y);
        y = out.template DeQue<float>();
        store_rows(total[first], padded, y, padded, 1, n);
        out.FreeTensor(y);
    }
}

}  // namespace turbogr::ascend
