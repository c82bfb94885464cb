// Kernel side: a table by distance as rows of square tiles, and the gradient of such a table.
//
// A tile has a key in each row and a query in each column, so that distances rise along a row and a row is a piece of the table:
// nothing is gathered. The row of the next key begins one entry earlier, but local addresses are multiples of 8 entries. So a
// tile's piece of the table is kept eight times, each moved by one entry, and row r reads the copy r mod 8. Its gradient goes the
// same way back: rows are added to eight sums, whole vectors at a time, and the sums to the table in global memory, where any
// entry may begin a copy. No entry is touched by scalar instructions.
#pragma once

#include "kernel_operator.h"

#include "align.h"
#include "pair_tables.h"
#include "strips.h"

namespace turbogr::ascend {

// Where row r begins in the pieces.
__aicore__ inline int64_t piece_of_row(int64_t row) {
    return row % COPIES * PIECE_STRIDE + LAST_GROUP - row / COPIES * COPIES;
}

class PositionRows {
  public:
    __aicore__ inline void init(AscendC::TPipe* pipe, GM_ADDR table, int64_t count) {
        pipe_ = pipe;
        count_ = count;
        table_.SetGlobalBuffer(reinterpret_cast<__gm__ float*>(table), static_cast<uint64_t>(count));
        pipe->InitBuffer(buffer_, static_cast<uint32_t>(PIECES_BYTES));
        pieces_ = buffer_.Get<float>();
    }

    // For a tile whose first query is `distance` >= 0 behind its first key, a multiple of COPIES. Entries of distances below 0
    // and beyond the table are 0.
    __aicore__ inline void prepare(int64_t distance) {
        AscendC::Duplicate(pieces_, 0.0f, static_cast<int32_t>(COPIES * PIECE_STRIDE));
        fence<AscendC::HardEvent::V_MTE2>(pipe_);
        for (int64_t copy = 0; copy < COPIES; copy++) {
            const int64_t lowest = distance - LAST_GROUP - copy;
            const int64_t begin = larger(0, -lowest), end = smaller(PIECE, count_ - lowest);
            if (begin >= end) continue;
            const int64_t left = begin % COPIES, right = round_up(end, COPIES) - end;
            const AscendC::DataCopyExtParams shape{1, static_cast<uint32_t>((end - begin) * 4), 0, 0, 0};
            const AscendC::DataCopyPadExtParams<float> padding{true, static_cast<uint8_t>(left), static_cast<uint8_t>(right), 0.0f};
            AscendC::DataCopyPad(
                pieces_[copy * PIECE_STRIDE + begin - left], table_[lowest + begin], shape,
                padding);
        }
        fence<AscendC::HardEvent::MTE2_V>(pipe_);
    }

    // The entries of a row's TILE columns.
    __aicore__ inline AscendC::LocalTensor<float> row(int64_t r) const { return pieces_[piece_of_row(r)]; }

  private:
    AscendC::TPipe* pipe_;
    int64_t count_;
    AscendC::GlobalTensor<float> table_;
    AscendC::TBuf<AscendC::TPosition::VECIN> buffer_;
    AscendC::LocalTensor<float> pieces_;
};

// The gradient: a core's own sums by distance, in global memory.
class DistanceSums {
  public:
    __aicore__ inline void init(AscendC::TPipe* pipe, GM_ADDR sums, int64_t count) {
        count_ = distance_sums(count);
        sums_.SetGlobalBuffer(reinterpret_cast<__gm__ float*>(sums), static_cast<uint64_t>(count_));
        pipe->InitBuffer(queue_, 2, static_cast<uint32_t>(PIECES_BYTES));
        constexpr int64_t most = COPIES * PIECE_STRIDE;
        AscendC::LocalTensor<float> zeros = queue_.AllocTensor<float>();
        AscendC::Duplicate(zeros, 0.0f, static_cast<int32_t>(most));
        queue_.EnQue(zeros);
        zeros = queue_.DeQue<float>();
        for (int64_t first = 0; first < count_; first += most) {
            store_rows(sums_[first], most, zeros, most, 1, smaller(most, count_ - first));
        }
        queue_.FreeTensor(zeros);
        AscendC::PipeBarrier<PIPE_MTE3>();
    }

    // Adds `rows` rows of TILE columns, 0 where there is no pair, of a tile as in PositionRows.
    __aicore__ inline void add(const AscendC::LocalTensor<float>& tile, int64_t rows, int64_t distance) {
        AscendC::LocalTensor<float> pieces = queue_.AllocTensor<float>();
        AscendC::Duplicate(pieces, 0.0f, static_cast<int32_t>(COPIES * PIECE_STRIDE));
        for (int64_t r = 0; r < rows; r++) {
            const AscendC::LocalTensor<float> to = pieces[piece_of_row(r)];
            AscendC::Add(to, to, tile[r * TILE], TILE);
        }
        queue_.EnQue(pieces);
        pieces = queue_.DeQue<float>();
        AscendC::SetAtomicAdd<float>();
        for (int64_t copy = 0; copy < smaller(rows, COPIES); copy++) {
            const int64_t first = BEFORE_DISTANCES + distance - LAST_GROUP - copy;
            store_rows(sums_[first], PIECE, pieces[copy * PIECE_STRIDE], PIECE, 1, PIECE);
            AscendC::PipeBarrier<PIPE_MTE3>();  // they overlap, and float32 sums depend on the order
        }
        AscendC::SetAtomicNone();
        queue_.FreeTensor(pieces);
    }

  private:
    int64_t count_;
    AscendC::GlobalTensor<float> sums_;
    AscendC::TQue<AscendC::TPosition::VECOUT, 1> queue_;
};

}  // namespace turbogr::ascend
