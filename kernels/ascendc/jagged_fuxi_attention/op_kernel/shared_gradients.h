// Kernel side: gradients of the position table and of the time table or function. Every core has sums of its own; behind a
// SyncAll they are added up in the cores' order, so that the result depends on how many cores there are, but not on which comes
// first.
#pragma once

#include "kernel_operator.h"

#include "../../common/position_rows.h"
#include "../../common/strips.h"
#include "../../common/table_gradients.h"
#include "../../common/tile_walk.h"
#include "../../common/time_pairs.h"
#include "../op_host/jagged_fuxi_attention_tiling.h"
#include "pair_weights.h"
#include "time_function.h"

namespace turbogr::ascend {

// Where gradients go; those of absent tensors are null.
struct FuxiGradients {
    GM_ADDR q;
    GM_ADDR k;
    GM_ADDR v;
    GM_ADDR position_bias;
    GM_ADDR time_parameters;
};

class SharedGradients {
  public:
    __aicore__ inline void init(
        AscendC::TPipe* pipe, const FuxiTiling* tiling, const FuxiWorkspace& work, GM_ADDR workspace, const FuxiGradients& to
    ) {
        pipe_ = pipe;
        tiling_ = tiling;
        work_ = work;
        workspace_ = workspace;
        to_ = to;
        core_ = AscendC::GetBlockIdx();
        strip_ = tiling->strip_rows * TILE;
        if (tiling->has_position()) {
            pipe->InitBuffer(tile_buffer_, static_cast<uint32_t>(TILE * TILE * 4));
            tile_ = tile_buffer_.Get<float>();
            distances_.init(pipe, workspace + core_ * work.bytes + work.distances, tiling->position_count);
        }
        if (tiling->time_kind == TIME_FUNCTION) function_.init(pipe);
        if (tiling->time_kind != TIME_TABLE) return;
        buckets_.init(pipe, tiling->buckets.count);
        pipe->InitBuffer(mask_buffer_, static_cast<uint32_t>(round_up(strip_ / 8, COPY_BYTES)));
        mask_ = mask_buffer_.Get<uint8_t>();
    }

    // Gradients of a square's position weights, strip after strip; then `add_positions` of the whole square.
    __aicore__ inline void keep_positions(const AscendC::LocalTensor<float>& grads, int64_t first, int64_t rows) {
        AscendC::DataCopy(tile_[first * TILE], grads, static_cast<uint32_t>(rows * TILE));
    }
    __aicore__ inline void add_positions(const PairTile& square) {
        distances_.add(tile_, square.keys, square.query - square.key);
    }

    // Gradients of the time weights of rows first ... first + rows of a square. scratch: that of the weights; work: one more
    // strip.
    __aicore__ inline void add_times(
        PairWeights& weights, const AscendC::LocalTensor<float>& grads, const AscendC::LocalTensor<float>& scratch,
        const AscendC::LocalTensor<float>& work, int64_t first, int64_t rows
    ) {
        if (tiling_->time_kind == TIME_FUNCTION) {
            const TimeFunctionParts parts = weights.function_parts(work, first, rows);
            function_.add(grads, parts, scratch, scratch[strip_], rows);
        } else {
            weights.offset_strip(work, first, rows);
            buckets_.add(grads, work, rows * TILE, scratch, strip_, mask_);
        }
    }

    // The core's sums to global memory, where those by distance already are.
    __aicore__ inline void store() {
        GM_ADDR times = workspace_ + core_ * work_.bytes + work_.times;
        if (tiling_->time_kind == TIME_FUNCTION) function_.store(times);
        if (tiling_->time_kind == TIME_TABLE) buckets_.store(times);
    }

    // in, out: queues whose buffers hold `piece` numbers.
    template <class In, class Out>
    __aicore__ inline void add_up_cores(
        const TimeFunction& function, In& in, Out& out, const AscendC::LocalTensor<float>& sum, int64_t piece
    ) {
        const int64_t stride = work_.bytes / 4, cores = tiling_->cores;
        if (tiling_->has_position()) {
            const PartialSums partial{workspace_ + work_.distances + BEFORE_DISTANCES * 4, stride, cores};
            add_up<1>(to_.position_bias, partial, tiling_->position_count, 1.0f, core_, in, out, sum, piece);
        }
        const PartialSums times{workspace_ + work_.times, stride, cores};
        if (tiling_->time_kind == TIME_TABLE) {
            add_up<PARTIAL_SUMS>(to_.time_parameters, times, tiling_->buckets.count, 1.0f, core_, in, out, sum, piece);
        }
        if (tiling_->time_kind == TIME_FUNCTION && core_ == 0) add_up_function(function, times, in, out, sum);
    }

  private:
    template <class In, class Out>
    __aicore__ inline void add_up_function(
        const TimeFunction& function, const PartialSums& partial, In& in, Out& out, const AscendC::LocalTensor<float>& sum
    ) {
        using namespace AscendC;
        constexpr int32_t n = static_cast<int32_t>(FUNCTION_SUMS), numbers = static_cast<int32_t>(FUNCTION_NUMBERS);
        Duplicate(sum, 0.0f, n);
        GlobalTensor<float> sums, total;
        total.SetGlobalBuffer(reinterpret_cast<__gm__ float*>(to_.time_parameters), static_cast<uint64_t>(FUNCTION_NUMBERS));
        for (int64_t c = 0; c < partial.cores; c++) {
            sums.SetGlobalBuffer(reinterpret_cast<__gm__ float*>(partial.first) + c * partial.stride, static_cast<uint64_t>(n));
            LocalTensor<float> x = in.template AllocTensor<float>();
            DataCopy(x, sums, static_cast<uint32_t>(n));
            in.EnQue(x);
            x = in.template DeQue<float>();
            Add(sum, sum, x, n);
            in.FreeTensor(x);
        }
        LocalTensor<float> y = out.template AllocTensor<float>();
        WholeReduceSum(y, sum, TILE, numbers, 1, 1, static_cast<int32_t>(TILE / COPIES));
        fence<HardEvent::V_S>(pipe_);
        for (uint32_t i = 0; i < FUNCTION_NUMBERS; i++) y.SetValue(i, y.GetValue(i) * function.factor(i));
        fence<HardEvent::S_MTE3>(pipe_);
        out.EnQue(y);
        y = out.template DeQue<float>();
        store_rows(total, COPIES, y, COPIES, 1, FUNCTION_NUMBERS);
        out.FreeTensor(y);
    }

    AscendC::TPipe* pipe_;
    const FuxiTiling* tiling_;
    FuxiWorkspace work_;
    GM_ADDR workspace_;
    FuxiGradients to_;
    int64_t core_, strip_;
    DistanceSums distances_;
    BucketSums buckets_;
    FunctionSums function_;
    AscendC::TBuf<AscendC::TPosition::VECCALC> tile_buffer_, mask_buffer_;
    AscendC::LocalTensor<float> tile_;
    AscendC::LocalTensor<uint8_t> mask_;
};

}  // namespace turbogr::ascend
