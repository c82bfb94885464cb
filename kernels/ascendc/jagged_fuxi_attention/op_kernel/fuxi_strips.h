// Kernel side: what forward and backward of FuXi's attention have in common. A strip is a few rows of a square tile of pairs,
// TILE float32 each; it comes from a product's result in global memory and goes back there as a factor of the next product.
#pragma once

#include "kernel_operator.h"
#include "lib/matmul_intf.h"

#include "../../common/attention_operands.h"
#include "../../common/pair_bias.h"
#include "../../common/products.h"
#include "../../common/strips.h"
#include "../../common/tile_walk.h"
#include "../op_host/jagged_fuxi_attention_tiling.h"
#include "pair_weights.h"

namespace turbogr::ascend {

enum FuxiChannel : int32_t { POSITION_CHANNEL, TIME_CHANNEL, SEMANTIC_CHANNEL };

// One Matmul object, whose products follow one another; the vector unit goes on while they are calculated.
template <typename P>
class ProductQueue {
  public:
    typename P::Type object;

    __aicore__ inline void post(
        const Matrix<typename P::Element>& a, const Matrix<typename P::Element>& b, const Matrix<float>& c, int64_t m,
        int64_t n, int64_t k, bool add
    ) {
        wait();
        turbogr::ascend::post<P>(object, a, b, c, m, n, k, add);
        busy_ = true;
    }
    __aicore__ inline void wait() {
        if (busy_) object.WaitIterateAll();
        busy_ = false;
    }

  private:
    bool busy_ = false;
};

// A core's matrices of pairs of one kind in the workspace: [2, FUXI_TILE_PAIRS], two slots or the two channels that heads
// share.
template <typename T>
struct PairSlots {
    AscendC::GlobalTensor<T> data;

    __aicore__ inline void init(GM_ADDR begin) {
        data.SetGlobalBuffer(reinterpret_cast<__gm__ T*>(begin), static_cast<uint64_t>(2 * FUXI_TILE_PAIRS));
    }
    __aicore__ inline AscendC::GlobalTensor<T> at(int64_t slot, int64_t element) const {
        return data[slot % 2 * FUXI_TILE_PAIRS + element];
    }
};

// Blocks of `width` numbers one behind the other, a block for each row and head: what is summed over pairs.
struct BlockSums {
    AscendC::GlobalTensor<float> data;
    int64_t width, row;  // of a block, of all heads

    __aicore__ inline void init(GM_ADDR begin, int64_t heads, int64_t of_width) {
        width = of_width;
        row = heads * of_width;
        data.SetGlobalBuffer(reinterpret_cast<__gm__ float*>(begin), static_cast<uint64_t>(BLOCK_ROWS * row));
    }
    __aicore__ inline Matrix<float> at(int64_t r, int64_t h) const { return {data[r * row + h * width], row}; }
};

template <typename E>
class FuxiStrips {
  protected:
    using In = AscendC::TQue<AscendC::TPosition::VECIN, 1>;
    using Out = AscendC::TQue<AscendC::TPosition::VECOUT, 1>;

    // Two buffers each, so that copies of one strip overlap with the other's calculation.
    __aicore__ inline void init_strips(AscendC::TPipe* pipe, const FuxiTiling* tiling) {
        pipe_ = pipe;
        tiling_ = tiling;
        strip_ = tiling->strip_rows * TILE;
        pipe->InitBuffer(in_, 2, static_cast<uint32_t>(strip_ * 4));
        pipe->InitBuffer(out_, 2, static_cast<uint32_t>(strip_ * sizeof(E)));
        pipe->InitBuffer(scratch_buffer_, static_cast<uint32_t>((SCRATCH_STRIPS + FUXI_WORK_STRIPS) * strip_ * 4));
        scratch_ = scratch_buffer_.Get<float>();
    }

    __aicore__ inline AscendC::LocalTensor<float> scratch(int64_t i) const { return scratch_[i * strip_]; }

    __aicore__ inline bool has(int64_t channel) const {
        if (channel == POSITION_CHANNEL) return tiling_->has_position();
        return channel == SEMANTIC_CHANNEL || tiling_->has_time();
    }
    __aicore__ inline bool some_shared() const { return tiling_->has_position() || tiling_->has_time(); }

    // Squares of a tile, and where a row of one of them begins in the tile's matrices.
    __aicore__ inline int64_t squares(const PairTile& tile) const {
        return ceil_divide(tile.keys, TILE) * ceil_divide(tile.queries, TILE);
    }
    __aicore__ inline PairTile square(const PairTile& tile, int64_t i) const {
        const int64_t across = ceil_divide(tile.queries, TILE), key = i / across * TILE, query = i % across * TILE;
        return {tile.key + key, smaller(TILE, tile.keys - key), tile.query + query, smaller(TILE, tile.queries - query)};
    }
    __aicore__ inline int64_t element(const PairTile& tile, const PairTile& square, int64_t row) const {
        return (square.key - tile.key + row) * walk_.stride() + square.query - tile.query;
    }

    // Rows of a square from results in global memory; the caller frees it.
    __aicore__ inline AscendC::LocalTensor<float> load_strip(
        In& queue, const AscendC::GlobalTensor<float>& from, int64_t rows, int64_t columns
    ) {
        AscendC::LocalTensor<float> x = queue.template AllocTensor<float>();
        load_rows(x, TILE, from, walk_.stride(), rows, columns);
        queue.EnQue(x);
        x = queue.template DeQue<float>();
        clear_behind(x, TILE, rows, columns);
        return x;
    }

    // scores = alpha q . k, and 1 + exp(-scores). Sigmoid and Silu would take local memory of their own.
    __aicore__ inline void score(
        const AscendC::LocalTensor<float>& x, const AscendC::LocalTensor<float>& denominator, int32_t n
    ) const {
        AscendC::Muls(x, x, tiling_->alpha, n);
        AscendC::Muls(denominator, x, -1.0f, n);
        AscendC::Exp(denominator, denominator, n);
        AscendC::Adds(denominator, denominator, 1.0f, n);
    }

    __aicore__ inline static void round(const AscendC::LocalTensor<E>& to, const AscendC::LocalTensor<float>& x, int64_t n) {
        if constexpr (sizeof(E) == 4) AscendC::Adds(to, x, 0.0f, static_cast<int32_t>(n));
        else AscendC::Cast(to, x, AscendC::RoundMode::CAST_RINT, static_cast<uint32_t>(n));
    }

    __aicore__ inline void put(
        Out& queue, const AscendC::LocalTensor<E>& filled, const AscendC::GlobalTensor<E>& to, int64_t stride, int64_t pitch,
        int64_t rows, int64_t columns
    ) {
        queue.EnQue(filled);
        const AscendC::LocalTensor<E> y = queue.template DeQue<E>();
        store_rows(to, stride, y, pitch, rows, columns);
        queue.FreeTensor(y);
    }

    // A strip, rounded, as rows of a matrix of pairs.
    __aicore__ inline void store_strip(
        Out& queue, const AscendC::GlobalTensor<E>& to, const AscendC::LocalTensor<float>& x, int64_t rows, int64_t columns
    ) {
        const AscendC::LocalTensor<E> y = queue.template AllocTensor<E>();
        round(y, x, rows * TILE);
        put(queue, y, to, walk_.stride(), TILE, rows, columns);
    }

    // The weights of a tile that all heads share: `to` has a matrix for each of the two channels.
    __aicore__ inline void store_shared_weights(
        PairWeights& weights, const PairTile& tile, const PairSlots<E>& to, int64_t origin
    ) {
        for (int64_t i = 0; i < squares(tile); i++) {
            const PairTile s = square(tile, i);
            weights.prepare(s, walk_.block.token);
            for (int64_t first = 0; first < s.keys; first += tiling_->strip_rows) {
                const int64_t rows = smaller(tiling_->strip_rows, s.keys - first), place = origin + element(tile, s, first);
                if (tiling_->has_position()) {
                    const AscendC::LocalTensor<E> y = out_.template AllocTensor<E>();
                    for (int64_t r = 0; r < rows; r++) {
                        round(y[r * TILE], weights.position_row(first + r), TILE);
                    }
                    put(out_, y, to.at(POSITION_CHANNEL, place), walk_.stride(), TILE, rows, s.queries);
                }
                if (tiling_->has_time()) {
                    const auto x = scratch(SCRATCH_STRIPS);
                    weights.time_strip(x, first, rows);
                    if (s.diagonal()) clear_future(x, first, rows);
                    store_strip(out_, to.at(TIME_CHANNEL, place), x, rows, s.queries);
                }
            }
        }
    }

    // A block's sums times a factor, rounded: `rows` rows to blocks `stride` numbers apart. With `more`, those are added.
    __aicore__ inline void store_sums(
        const AscendC::GlobalTensor<E>& to, int64_t stride, const BlockSums& sums, int64_t rows, float factor,
        In* second = nullptr, const BlockSums* more = nullptr
    ) {
        const int64_t blocks = rows * tiling_->heads, width = sums.width, step = COPY_ELEMENTS<E>;
        // Blocks that lie together are copied as one.
        const bool together = stride == width;
        const int64_t pitch = together ? 1 : round_up(width, step), most = strip_ / (together ? width : pitch);
        for (int64_t first = 0; first < blocks; first += most) {
            const int64_t count = smaller(most, blocks - first);
            const int64_t lines = together ? 1 : count, columns = together ? count * width : width;
            const int64_t room = round_up(columns, step), n = lines * room;
            AscendC::LocalTensor<float> x = load_blocks(in_, sums, first, lines, columns, room);
            AscendC::Muls(x, x, factor, static_cast<int32_t>(n));
            if (more != nullptr) {
                const AscendC::LocalTensor<float> y = load_blocks(*second, *more, first, lines, columns, room);
                AscendC::Add(x, x, y, static_cast<int32_t>(n));
                second->FreeTensor(y);
            }
            const AscendC::LocalTensor<E> y = out_.template AllocTensor<E>();
            round(y, x, n);
            in_.FreeTensor(x);
            put(out_, y, to[first * stride], stride, room, lines, columns);
        }
    }

    AscendC::TPipe* pipe_;
    const FuxiTiling* tiling_;
    int64_t strip_;
    TileWalk walk_;
    In in_;
    Out out_;

  private:
    __aicore__ inline AscendC::LocalTensor<float> load_blocks(
        In& queue, const BlockSums& sums, int64_t first, int64_t lines, int64_t columns, int64_t room
    ) {
        AscendC::LocalTensor<float> x = queue.template AllocTensor<float>();
        load_rows(x, room, sums.data[first * sums.width], columns, lines, columns);
        queue.EnQue(x);
        x = queue.template DeQue<float>();
        clear_behind(x, room, lines, columns);
        return x;
    }

    AscendC::TBuf<AscendC::TPosition::VECCALC> scratch_buffer_;
    AscendC::LocalTensor<float> scratch_;
};

}  // namespace turbogr::ascend
