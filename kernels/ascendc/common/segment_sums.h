// Kernel side: sums of rows over segments, result[r] = sum of weights[p] * source[index[p]] for starts(r) <= p < starts(r + 1), in
// float32 and in the order of p. sum_parts.h says which core sums what.
//
// While the vector unit adds up one block of rows, the next is fetched; sums are written a tile at a time. A row that cores share
// leaves its parts in the workspace; after a SyncAll they are added up.
#pragma once

#include "kernel_operator.h"

#include "row_stream.h"
#include "strips.h"
#include "sum_parts.h"

namespace turbogr::ascend {

// Starts that global memory lists; row 0's is one of a longer list.
class ListedStarts {
  public:
    __aicore__ inline void init(AscendC::TPipe* pipe, GM_ADDR starts, int64_t count, int64_t capacity) {
        all_.SetGlobalBuffer(reinterpret_cast<__gm__ int64_t*>(starts), static_cast<uint64_t>(count));
        numbers_.init(pipe, capacity);
    }
    __aicore__ inline void open(int64_t first) {
        first_ = first;
        until(-1);
    }
    // `next` will be asked for no row behind this one.
    __aicore__ inline void until(int64_t row) { numbers_.open(all_, first_ + row + 1); }
    // The end of a search is done in local memory.
    __aicore__ inline void near(int64_t low, int64_t high) {
        if (high - low >= SEARCH_NUMBERS || (numbers_.has(first_ + low) && numbers_.has(first_ + high))) return;
        until(high);
        numbers_.at(first_ + low);
    }
    // Anywhere, and row after row.
    __aicore__ inline int64_t at(int64_t row) {
        return numbers_.has(first_ + row) ? numbers_.at(first_ + row) : all_.GetValue(static_cast<uint64_t>(first_ + row));
    }
    __aicore__ inline int64_t next(int64_t row) { return numbers_.at(first_ + row); }

  private:
    AscendC::GlobalTensor<int64_t> all_;
    Numbers<int64_t> numbers_;
    int64_t first_ = 0;
};

// Every row has as many positions.
struct EqualStarts {
    int64_t count;

    __aicore__ inline void near(int64_t, int64_t) const {}
    __aicore__ inline void until(int64_t) const {}
    __aicore__ inline int64_t at(int64_t row) const { return row * count; }
    __aicore__ inline int64_t next(int64_t row) const { return row * count; }
};

// What is summed into what. Without weights (the class's WEIGHTED) they are 1.
template <typename E>
struct Summed {
    AscendC::GlobalTensor<E> source;  // [source_rows, width]
    int64_t source_rows;
    AscendC::GlobalTensor<int64_t> index;
    AscendC::GlobalTensor<E> weights;
    AscendC::GlobalTensor<E> result;  // [rows, width]
    int64_t rows;
};

template <typename E, bool WEIGHTED>
class SegmentSums {
    enum Share : int64_t { OF_FIRST_ROW, OF_LAST_ROW };

  public:
    __aicore__ inline void init(AscendC::TPipe* pipe, const SumTiling& tiling, int64_t cores, GM_ADDR workspace) {
        t_ = tiling;
        cores_ = cores;
        core_ = AscendC::GetBlockIdx();
        shared_.SetGlobalBuffer(
            reinterpret_cast<__gm__ float*>(workspace), static_cast<uint64_t>(SHARED_SUMS * cores * SHARED_ROWS * t_.pitch));
        const uint32_t row = static_cast<uint32_t>(t_.pitch * sizeof(float));
        index_.init(pipe, t_.numbers);
        if constexpr (WEIGHTED) weights_.init(pipe, t_.numbers);
        blocks_.init(pipe, t_.tile_rows, t_.pitch);
        pipe->InitBuffer(sums_, t_.tile_rows * row);
        pipe->InitBuffer(written_, 2, static_cast<uint32_t>(t_.tile_rows * t_.pitch * sizeof(E)));
        pipe->InitBuffer(share_in_, 1, row);
        pipe->InitBuffer(share_out_, 1, row);
    }

    // All cores call it for the same sums in the same order.
    template <class Starts>
    __aicore__ inline void run(const Summed<E>& s, Starts& starts) {
        part_ = sum_part(starts, s.rows, cores_, core_);
        if (!part_.empty) sum_own(s, starts);
        AscendC::PipeBarrier<PIPE_ALL>();
        AscendC::SyncAll();
        if (!part_.empty && part_.completes()) complete(s);
        which_sum_ = 1 - which_sum_;
    }

  private:
    template <class Starts>
    __aicore__ inline void sum_own(const Summed<E>& s, Starts& starts) {
        index_.open(s.index, part_.last);
        if constexpr (WEIGHTED) weights_.open(s.weights, part_.last);
        starts.until(smaller(part_.last_row + 1, s.rows));
        row_ = tile_ = part_.first_row;
        row_end_ = starts.next(row_ + 1);
        clear();
        ask(s, part_.first);
        for (int64_t p = part_.first; p < part_.last; p += t_.tile_rows) {
            ask(s, p + t_.tile_rows);
            add(s, starts, p);
        }
        while (row_ < part_.last_row) finish_row(s, starts);
        if (part_.stops) share(row_ - tile_, OF_LAST_ROW);
        write(s, row_);
    }

    // Of the first row, which other cores began.
    __aicore__ inline void complete(const Summed<E>& s) {
        tile_ = part_.first_row;
        clear();
        for (int64_t core = first_core_of(part_, cores_, core_); core < core_; core++) {
            if (even_cut(part_.items, cores_, core) < even_cut(part_.items, cores_, core + 1)) add_share(core, OF_LAST_ROW);
        }
        add_share(core_, OF_FIRST_ROW);
        write(s, tile_ + 1);
    }

    __aicore__ inline AscendC::LocalTensor<float> sum(int64_t row) {
        return sums_.template Get<float>()[row * t_.pitch];
    }
    __aicore__ inline void clear() { AscendC::Duplicate(sum(0), 0.0f, t_.tile_rows * t_.pitch); }

    __aicore__ inline void ask(const Summed<E>& s, int64_t first) {
        const int64_t count = smaller(t_.tile_rows, part_.last - first);
        if (count > 0) blocks_.ask(s.source, index_, first, count, t_.width, s.source_rows);
    }

    template <class Starts>
    __aicore__ inline void add(const Summed<E>& s, Starts& starts, int64_t first) {
        const int64_t count = smaller(t_.tile_rows, part_.last - first);
        const auto rows = blocks_.take(count);
        for (int64_t i = 0; i < count; i++) {
            while (first + i >= row_end_) finish_row(s, starts);
            const auto to = sum(row_ - tile_), from = rows[i * t_.pitch];
            if constexpr (WEIGHTED) AscendC::Axpy(to, from, weights_.at(first + i), t_.pitch);
            else AscendC::Add(to, to, from, t_.pitch);
        }
        blocks_.give_back();
    }

    template <class Starts>
    __aicore__ inline void finish_row(const Summed<E>& s, Starts& starts) {
        if (part_.resumes && row_ == part_.first_row) {
            share(0, OF_FIRST_ROW);
            clear();
            tile_ = row_ + 1;
        } else if (row_ + 1 - tile_ == t_.tile_rows) {
            write(s, row_ + 1);
        }
        row_++;
        if (row_ < s.rows) row_end_ = starts.next(row_ + 1);
    }

    // The sums of rows tile_ ... end.
    __aicore__ inline void write(const Summed<E>& s, int64_t end) {
        const int64_t count = end - tile_;
        if (count == 0) return;
        auto rows = written_.template AllocTensor<E>();
        to_elements(rows, sum(0), count * t_.pitch);
        written_.EnQue(rows);
        rows = written_.template DeQue<E>();
        store_rows(s.result[tile_ * t_.width], t_.width, rows, t_.pitch, count, t_.width);
        written_.FreeTensor(rows);
        clear();
        tile_ = end;
    }

    __aicore__ inline AscendC::GlobalTensor<float> shared_row(int64_t core, Share which) {
        return shared_[((which_sum_ * cores_ + core) * SHARED_ROWS + which) * t_.pitch];
    }
    __aicore__ inline void share(int64_t row, Share which) {
        auto x = share_out_.template AllocTensor<float>();
        AscendC::Muls(x, sum(row), 1.0f, t_.pitch);
        share_out_.EnQue(x);
        x = share_out_.template DeQue<float>();
        AscendC::DataCopy(shared_row(core_, which), x, static_cast<uint32_t>(t_.pitch));
        share_out_.FreeTensor(x);
    }
    __aicore__ inline void add_share(int64_t core, Share which) {
        auto x = share_in_.template AllocTensor<float>();
        AscendC::DataCopy(x, shared_row(core, which), static_cast<uint32_t>(t_.pitch));
        share_in_.EnQue(x);
        x = share_in_.template DeQue<float>();
        AscendC::Add(sum(0), sum(0), x, t_.pitch);
        share_in_.FreeTensor(x);
    }

    SumTiling t_;
    int64_t cores_, core_, which_sum_ = 0;
    SumPart part_;
    AscendC::GlobalTensor<float> shared_;  // [SHARED_SUMS, cores, SHARED_ROWS, pitch]
    int64_t row_, tile_, row_end_;  // the row that is summed, the tile's first one, where the row's positions end
    Numbers<int64_t> index_;
    Numbers<E, float> weights_;
    RowBlocks<E, 2> blocks_;
    AscendC::TBuf<AscendC::TPosition::VECCALC> sums_;
    AscendC::TQue<AscendC::TPosition::VECOUT, 2> written_;
    AscendC::TQue<AscendC::TPosition::VECIN, 1> share_in_;
    AscendC::TQue<AscendC::TPosition::VECOUT, 1> share_out_;
};

}  // namespace turbogr::ascend
