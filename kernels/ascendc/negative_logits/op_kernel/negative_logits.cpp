// turbogr::negative_logits, forward. The formula stands in turbogr/ops/negative_logits.py, the design in ../README.md.

#include "kernel_operator.h"

#include "../../common/row_stream.h"
#include "../op_host/negative_logits_tiling.h"

namespace turbogr::ascend {

template <typename E>
class NegativeForward {
  public:
    __aicore__ inline void init(
        AscendC::TPipe* pipe, const NegativeTiling& tiling, GM_ADDR output, GM_ADDR rows, GM_ADDR index, GM_ADDR logits
    ) {
        t_ = tiling;
        const int64_t width = t_.sums.width, pairs = t_.tokens * t_.samples;
        output_.SetGlobalBuffer(reinterpret_cast<__gm__ E*>(output), static_cast<uint64_t>(t_.tokens * width));
        rows_.SetGlobalBuffer(reinterpret_cast<__gm__ E*>(rows), static_cast<uint64_t>(t_.rows * width));
        all_index_.SetGlobalBuffer(reinterpret_cast<__gm__ int64_t*>(index), static_cast<uint64_t>(pairs));
        logits_.SetGlobalBuffer(reinterpret_cast<__gm__ E*>(logits), static_cast<uint64_t>(pairs));
        index_.init(pipe, t_.numbers);
        sampled_.init(pipe, t_.block_rows, t_.sums.pitch);
        tokens_.init(pipe, t_.block_rows, t_.sums.pitch);
        pipe->InitBuffer(products_, static_cast<uint32_t>(t_.block_rows * t_.lane_pitch * sizeof(float)));
        const int64_t padded = round_up(t_.block_rows, COPY_ELEMENTS<E>);
        pipe->InitBuffer(dots_, static_cast<uint32_t>(t_.block_rows * sizeof(float)));
        pipe->InitBuffer(written_, 2, static_cast<uint32_t>(padded * sizeof(E)));
    }

    // A core has tokens that follow each other; the segment of rows that is in local memory knows no borders between them.
    __aicore__ inline void run() {
        const int64_t core = AscendC::GetBlockIdx();
        const int64_t begin = even_cut(t_.tokens, t_.cores, core);
        end_token_ = even_cut(t_.tokens, t_.cores, core + 1);
        end_ = end_token_ * t_.samples;
        if (begin * t_.samples == end_) return;
        index_.open(all_index_, end_);
        token_ = begin;
        take_tokens();
        ask(begin * t_.samples);
        for (int64_t p = begin * t_.samples; p < end_; p += t_.block_rows) {
            ask(p + t_.block_rows);
            multiply(p, smaller(t_.block_rows, end_ - p));
        }
        tokens_.give_back();
    }

  private:
    __aicore__ inline void ask(int64_t first) {
        const int64_t count = smaller(t_.block_rows, end_ - first);
        if (count > 0) sampled_.ask(rows_, index_, first, count, t_.sums.width, t_.rows);
    }

    // The outputs of token_ and those behind it.
    __aicore__ inline void take_tokens() {
        const int64_t count = smaller(t_.block_rows, end_token_ - token_);
        tokens_.ask(output_[token_ * t_.sums.width], count, t_.sums.width);
        outputs_ = tokens_.take(count);
        first_token_ = token_;
        last_token_ = token_ + count;
        token_end_ = (token_ + 1) * t_.samples;
    }

    __aicore__ inline void multiply(int64_t first, int64_t count) {
        const auto rows = sampled_.take(count);
        const auto products = products_.Get<float>(), dots = dots_.Get<float>();
        for (int64_t i = 0; i < count; i++) {
            if (first + i == token_end_) next_token();
            const auto x = rows[i * t_.sums.pitch];
            const auto y = outputs_[(token_ - first_token_) * t_.sums.pitch];
            fold(products[i * t_.lane_pitch], x, y);
        }
        sampled_.give_back();
        // One call adds up all rows' products.
        AscendC::WholeReduceSum<float>(
            dots, products, t_.lanes, static_cast<int32_t>(count), 1, 1,
            static_cast<int32_t>(t_.lane_pitch / COPY_ELEMENTS<float>));
        auto logits = written_.template AllocTensor<E>();
        to_elements(logits, dots, count);
        written_.EnQue(logits);
        logits = written_.template DeQue<E>();
        store_rows(logits_[first], count, logits, round_up(count, COPY_ELEMENTS<E>), 1, count);
        written_.FreeTensor(logits);
    }

    __aicore__ inline void next_token() {
        token_++;
        token_end_ += t_.samples;
        if (token_ < last_token_) return;
        tokens_.give_back();
        take_tokens();
    }

    // to = products of x and y, those of columns NEGATIVE_LANES apart added up.
    __aicore__ inline void fold(
        const AscendC::LocalTensor<float>& to, const AscendC::LocalTensor<float>& x, const AscendC::LocalTensor<float>& y
    ) {
        const int64_t width = t_.sums.width;
        AscendC::Mul(to, x, y, t_.lanes);
        for (int64_t column = NEGATIVE_LANES; column < width; column += NEGATIVE_LANES) {
            const uint32_t at = static_cast<uint32_t>(column);
            AscendC::MulAddDst(to, x[at], y[at], static_cast<int32_t>(smaller(NEGATIVE_LANES, width - column)));
        }
    }

    NegativeTiling t_;
    AscendC::GlobalTensor<E> output_, rows_, logits_;
    AscendC::GlobalTensor<int64_t> all_index_;
    Numbers<int64_t> index_;
    RowBlocks<E, 2> sampled_;
    RowBlocks<E, 1> tokens_;
    AscendC::TBuf<AscendC::TPosition::VECCALC> products_, dots_;
    AscendC::TQue<AscendC::TPosition::VECOUT, 2> written_;
    AscendC::LocalTensor<float> outputs_;
    int64_t end_, end_token_;           // of this core
    int64_t token_, token_end_;         // the token of the next pair, and where its pairs end
    int64_t first_token_, last_token_;  // tokens in local memory
};

template <typename E>
__aicore__ inline void negative_forward(GM_ADDR output, GM_ADDR rows, GM_ADDR index, GM_ADDR logits, GM_ADDR tiling) {
    NegativeTiling t;
    read_struct(t, tiling);
    AscendC::TPipe pipe;
    NegativeForward<E> kernel;
    kernel.init(&pipe, t, output, rows, index, logits);
    kernel.run();
}

}  // namespace turbogr::ascend

// One entry for each dtype of output, rows and logits. The index is int64 [T, R].
#define TURBOGR_NEGATIVE_FORWARD(NAME, TYPE)                                                                           \
    extern "C" __global__ __aicore__ void NAME(                                                                        \
        GM_ADDR output, GM_ADDR rows, GM_ADDR index, GM_ADDR logits, GM_ADDR workspace, GM_ADDR tiling                 \
    ) {                                                                                                                \
        KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);                                                                \
        (void)workspace;                                                                                               \
        turbogr::ascend::negative_forward<TYPE>(output, rows, index, logits, tiling);                                  \
    }

TURBOGR_NEGATIVE_FORWARD(negative_logits_float, float)
TURBOGR_NEGATIVE_FORWARD(negative_logits_half, half)
TURBOGR_NEGATIVE_FORWARD(negative_logits_bfloat16, bfloat16_t)
