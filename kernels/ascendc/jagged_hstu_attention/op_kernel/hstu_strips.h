// Kernel side: what forward and backward of HSTU attention have in common. A strip is a few rows of a square tile of pairs, TILE
// float32 each; it comes from a product's result in global memory and goes back there as a factor of the next product.
#pragma once

#include "kernel_operator.h"
#include "lib/matmul_intf.h"

#include "../../common/attention_operands.h"
#include "../../common/pair_bias.h"
#include "../../common/products.h"
#include "../../common/strips.h"
#include "../../common/tile_walk.h"
#include "../op_host/jagged_hstu_attention_tiling.h"

namespace turbogr::ascend {

// A core's matrices of one kind in the workspace: [2 slots, heads, TILE_PAIRS], or sums [1, heads, BLOCK_ROWS, width].
template <typename T>
struct Slots {
    AscendC::GlobalTensor<T> data;
    int64_t slot, head;  // elements of each

    __aicore__ inline void init(GM_ADDR begin, int64_t slots, int64_t heads, int64_t elements) {
        head = elements;
        slot = heads * elements;
        data.SetGlobalBuffer(reinterpret_cast<__gm__ T*>(begin), static_cast<uint64_t>(slots * slot));
    }
    __aicore__ inline AscendC::GlobalTensor<T> at(int64_t tile, int64_t h, int64_t element = 0) const {
        return data[tile % 2 * slot + h * head + element];
    }
};

template <typename E>
class HstuStrips {
  protected:
    using In = AscendC::TQue<AscendC::TPosition::VECIN, 1>;
    using Out = AscendC::TQue<AscendC::TPosition::VECOUT, 1>;

    // Two buffers each, so that copies of one strip overlap with the other's calculation.
    __aicore__ inline void init_strips(AscendC::TPipe* pipe, const HstuTiling* tiling) {
        pipe_ = pipe;
        tiling_ = tiling;
        strip_ = tiling->strip_rows * TILE;
        pipe->InitBuffer(scores_in_, 2, static_cast<uint32_t>(strip_ * 4));
        pipe->InitBuffer(out_, 2, static_cast<uint32_t>(strip_ * sizeof(E)));
        pipe->InitBuffer(scratch_buffer_, static_cast<uint32_t>(SCRATCH_STRIPS * strip_ * 4));
        scratch_ = scratch_buffer_.Get<float>();
    }

    __aicore__ inline AscendC::LocalTensor<float> scratch(int64_t i) const { return scratch_[i * strip_]; }

    // Rows first ... first + rows of a square, from a tile of results with rows `stride` apart. The caller frees it.
    __aicore__ inline AscendC::LocalTensor<float> load_strip(
        In& queue, const AscendC::GlobalTensor<float>& from, int64_t stride, int64_t rows, int64_t columns
    ) {
        AscendC::LocalTensor<float> x = queue.template AllocTensor<float>();
        load_rows(x, TILE, from, stride, rows, columns);
        queue.EnQue(x);
        x = queue.template DeQue<float>();
        clear_behind(x, TILE, rows, columns);
        return x;
    }

    // factor * x, rounded, to global memory: the first `columns` of rows `pitch` apart.
    __aicore__ inline void store(
        Out& queue, const AscendC::GlobalTensor<E>& to, int64_t stride, const AscendC::LocalTensor<float>& x, float factor,
        int64_t pitch, int64_t rows, int64_t columns
    ) {
        const int32_t n = static_cast<int32_t>(rows * pitch);
        AscendC::LocalTensor<E> y = queue.template AllocTensor<E>();
        if constexpr (sizeof(E) == 4) {
            AscendC::Muls(y, x, factor, n);
        } else {
            if (factor != 1.0f) AscendC::Muls(x, x, factor, n);
            AscendC::Cast(y, x, AscendC::RoundMode::CAST_RINT, static_cast<uint32_t>(n));
        }
        queue.EnQue(y);
        y = queue.template DeQue<E>();
        store_rows(to, stride, y, pitch, rows, columns);
        queue.FreeTensor(y);
    }

    // scores = alpha q . k + bias, and 1 + exp(-scores).
    __aicore__ inline void score(
        const AscendC::LocalTensor<float>& x, const AscendC::LocalTensor<float>& denominator, const PairBias& bias, int64_t first,
        int32_t n
    ) const {
        AscendC::Muls(x, x, tiling_->alpha, n);
        if (bias.some()) AscendC::Add(x, x, bias.bias(first), n);
        AscendC::Muls(denominator, x, -1.0f, n);
        AscendC::Exp(denominator, denominator, n);
        AscendC::Adds(denominator, denominator, 1.0f, n);
    }

    // Sums [heads, BLOCK_ROWS, width] of a block's rows times a factor, rounded, to [tokens, heads, width].
    __aicore__ inline void store_sums(const Slots<float>& sums, const Heads<E>& to, int64_t token, int64_t rows, float factor) {
        const int64_t pitch = round_up(to.width, COPY_ELEMENTS<E>), most = strip_ / pitch;
        for (int64_t h = 0; h < tiling_->heads; h++) {
            for (int64_t first = 0; first < rows; first += most) {
                const int64_t count = smaller(most, rows - first);
                AscendC::LocalTensor<float> x = scores_in_.template AllocTensor<float>();
                load_rows(x, pitch, sums.at(0, h, first * to.width), to.width, count, to.width);
                scores_in_.EnQue(x);
                x = scores_in_.template DeQue<float>();
                clear_behind(x, pitch, count, to.width);
                const Matrix<E> place = to.at(token + first, h);
                store(out_, place.data, place.stride, x, factor, pitch, count, to.width);
                scores_in_.FreeTensor(x);
            }
        }
    }

    AscendC::TPipe* pipe_;
    const HstuTiling* tiling_;
    int64_t strip_;
    In scores_in_;
    Out out_;
    AscendC::TBuf<AscendC::TPosition::VECCALC> scratch_buffer_;
    AscendC::LocalTensor<float> scratch_;
};

}  // namespace turbogr::ascend
