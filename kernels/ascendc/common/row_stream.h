// Kernel side: numbers that the scalar unit reads one after the other, and rows that are fetched by them.
#pragma once

#include "kernel_operator.h"

#include "align.h"
#include "strips.h"

namespace turbogr::ascend {

template <typename E>
constexpr bool IS_NARROW = sizeof(E) == 2;

// to = from as E: a copy, or rounded to nearest.
template <typename E>
__aicore__ inline void to_elements(const AscendC::LocalTensor<E>& to, const AscendC::LocalTensor<float>& from, int64_t count) {
    if constexpr (IS_NARROW<E>) AscendC::Cast(to, from, AscendC::RoundMode::CAST_RINT, static_cast<uint32_t>(count));
    else AscendC::Muls(to, from, 1.0f, static_cast<int32_t>(count));
}

// Numbers in global memory, read mostly in order: a chunk of them is in local memory. Narrow ones are read as float.
template <typename T, typename Read = T>
class Numbers {
    static constexpr bool CASTS = sizeof(T) != sizeof(Read);

  public:
    __aicore__ inline void init(AscendC::TPipe* pipe, int64_t capacity) {
        pipe_ = pipe;
        capacity_ = capacity;
        pipe->InitBuffer(stored_, static_cast<uint32_t>(capacity * sizeof(T)));
        if constexpr (CASTS) pipe->InitBuffer(cast_, static_cast<uint32_t>(capacity * sizeof(Read)));
    }

    // Nothing at or behind `end` will be read.
    __aicore__ inline void open(const AscendC::GlobalTensor<T>& all, int64_t end) {
        all_ = all;
        end_ = end;
        first_ = count_ = 0;
    }

    __aicore__ inline bool has(int64_t i) const { return i >= first_ && i < first_ + count_; }
    __aicore__ inline Read at(int64_t i) {
        if (!has(i)) load(i);
        if constexpr (CASTS) return cast_.template Get<Read>().GetValue(static_cast<uint32_t>(i - first_));
        else return stored_.template Get<T>().GetValue(static_cast<uint32_t>(i - first_));
    }

  private:
    __aicore__ inline void load(int64_t i) {
        using AscendC::HardEvent;
        first_ = i;
        count_ = smaller(capacity_, end_ - i);
        const auto stored = stored_.template Get<T>();
        if constexpr (CASTS) fence<HardEvent::V_MTE2>(pipe_);
        else fence<HardEvent::S_MTE2>(pipe_);
        load_rows(stored, round_up(count_, COPY_ELEMENTS<T>), all_[i], 0, 1, count_);
        if constexpr (CASTS) {
            fence<HardEvent::MTE2_V>(pipe_);
            fence<HardEvent::S_V>(pipe_);
            AscendC::Cast(cast_.template Get<Read>(), stored, AscendC::RoundMode::CAST_NONE, static_cast<uint32_t>(count_));
            fence<HardEvent::V_S>(pipe_);
        } else {
            fence<HardEvent::MTE2_S>(pipe_);
        }
    }

    AscendC::TPipe* pipe_;
    AscendC::TBuf<AscendC::TPosition::VECCALC> stored_, cast_;
    AscendC::GlobalTensor<T> all_;
    int64_t capacity_, end_ = 0, first_ = 0, count_ = 0;
};

// A queue of blocks of rows for the vector unit, which gets them as float32.
template <typename E, int32_t BUFFERS>
class RowBlocks {
  public:
    __aicore__ inline void init(AscendC::TPipe* pipe, int64_t rows, int64_t pitch) {
        pitch_ = pitch;
        pipe->InitBuffer(queue_, BUFFERS, static_cast<uint32_t>(rows * pitch * sizeof(E)));
        if constexpr (IS_NARROW<E>) pipe->InitBuffer(wide_, static_cast<uint32_t>(rows * pitch * sizeof(float)));
    }

    // Asks for `count` rows that lie one after the other.
    __aicore__ inline void ask(const AscendC::GlobalTensor<E>& from, int64_t count, int64_t width) {
        const auto rows = queue_.template AllocTensor<E>();
        load_rows(rows, pitch_, from, width, count, width);
        queue_.EnQue(rows);
    }

    // Asks for the rows of `from` [limit, width] that numbers first ... first + count name. One that is not there stops the kernel.
    __aicore__ inline void ask(
        const AscendC::GlobalTensor<E>& from, Numbers<int64_t>& numbers, int64_t first, int64_t count, int64_t width, int64_t limit
    ) {
        const auto rows = queue_.template AllocTensor<E>();
        fetch(rows, pitch_, from, numbers, first, count, width, limit);
        queue_.EnQue(rows);
    }

    __aicore__ inline static void fetch(
        const AscendC::LocalTensor<E>& to, int64_t pitch, const AscendC::GlobalTensor<E>& from, Numbers<int64_t>& numbers,
        int64_t first, int64_t count, int64_t width, int64_t limit
    ) {
        for (int64_t i = 0; i < count; i++) {
            const int64_t row = numbers.at(first + i);
            if (row < 0 || row >= limit) AscendC::Trap();
            load_rows(to[i * pitch], pitch, from[row * width], width, 1, width);
        }
    }

    // The rows asked for first, `pitch` apart, zeros behind their columns; to be given back before the next.
    __aicore__ inline AscendC::LocalTensor<float> take(int64_t count) {
        taken_ = queue_.template DeQue<E>();
        if constexpr (IS_NARROW<E>) {
            const auto wide = wide_.template Get<float>();
            AscendC::Cast(wide, taken_, AscendC::RoundMode::CAST_NONE, static_cast<uint32_t>(count * pitch_));
            queue_.FreeTensor(taken_);
            return wide;
        } else {
            return taken_;
        }
    }
    __aicore__ inline void give_back() {
        if constexpr (!IS_NARROW<E>) queue_.FreeTensor(taken_);
    }

  private:
    AscendC::TQue<AscendC::TPosition::VECIN, BUFFERS> queue_;
    AscendC::TBuf<AscendC::TPosition::VECCALC> wide_;
    AscendC::LocalTensor<E> taken_;
    int64_t pitch_;
};

}  // namespace turbogr::ascend
