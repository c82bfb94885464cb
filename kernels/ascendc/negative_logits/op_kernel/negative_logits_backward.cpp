// turbogr::negative_logits, backward: both gradients are sums of rows with weights. Design in ../README.md.

#include "kernel_operator.h"

#include "../../common/segment_sums.h"
#include "../op_host/negative_logits_tiling.h"

namespace turbogr::ascend {

// Addresses, in the order of the kernel's arguments. GM_ADDR is a macro that ends with a star: one each.
struct NegativeGradients {
    GM_ADDR gradient;
    GM_ADDR output;
    GM_ADDR rows;
    GM_ADDR index;
    GM_ADDR tokens;
    GM_ADDR weights;
    GM_ADDR starts;
    GM_ADDR output_gradient;
    GM_ADDR rows_gradient;
};

template <typename E>
class NegativeBackward {
  public:
    __aicore__ inline void init(AscendC::TPipe* pipe, const NegativeTiling& tiling, const NegativeGradients& a, GM_ADDR workspace) {
        t_ = tiling;
        const int64_t pairs = t_.tokens * t_.samples;
        // output_gradient[t] = sum over r of gradient[t, r] * rows[index[t, r]]
        matrix(of_output_.source, a.rows, of_output_.source_rows, t_.rows);
        matrix(of_output_.result, a.output_gradient, of_output_.rows, t_.tokens);
        list(of_output_.index, a.index, pairs);
        list(of_output_.weights, a.gradient, pairs);
        // rows_gradient[u] = sum over the pairs (t, r) that drew u, in their order, of gradient[t, r] * output[t]
        matrix(of_rows_.source, a.output, of_rows_.source_rows, t_.tokens);
        matrix(of_rows_.result, a.rows_gradient, of_rows_.rows, t_.rows);
        list(of_rows_.index, a.tokens, pairs);
        list(of_rows_.weights, a.weights, pairs);
        starts_.init(pipe, a.starts, t_.rows + 1, t_.sums.numbers);
        starts_.open(0);
        sums_.init(pipe, t_.sums, t_.cores, workspace);
    }

    __aicore__ inline void run() {
        EqualStarts every_token{t_.samples};
        sums_.run(of_output_, every_token);
        sums_.run(of_rows_, starts_);
    }

  private:
    __aicore__ inline void matrix(AscendC::GlobalTensor<E>& to, GM_ADDR address, int64_t& rows, int64_t count) {
        list(to, address, count * t_.sums.width);
        rows = count;
    }
    template <typename T>
    __aicore__ inline void list(AscendC::GlobalTensor<T>& to, GM_ADDR address, int64_t count) {
        to.SetGlobalBuffer(reinterpret_cast<__gm__ T*>(address), static_cast<uint64_t>(count));
    }

    NegativeTiling t_;
    Summed<E> of_output_, of_rows_;
    ListedStarts starts_;
    SegmentSums<E, true> sums_;
};

template <typename E>
__aicore__ inline void negative_backward(const NegativeGradients& addresses, GM_ADDR workspace, GM_ADDR tiling) {
    NegativeTiling t;
    read_struct(t, tiling);
    AscendC::TPipe pipe;
    NegativeBackward<E> kernel;
    kernel.init(&pipe, t, addresses, AscendC::GetUserWorkspace(workspace));
    kernel.run();
}

}  // namespace turbogr::ascend

// One entry for each dtype. index is int64 [T, R]. Of its pairs (t, r) sorted by index, stably: tokens is int64 [T * R], each
// pair's t; weights [T * R], its gradient; starts int64 [U + 1], where each row's begin.
#define TURBOGR_NEGATIVE_BACKWARD(NAME, TYPE)                                                                                  \
    extern "C" __global__ __aicore__ void NAME(                                                                                \
        GM_ADDR gradient, GM_ADDR output, GM_ADDR rows, GM_ADDR index, GM_ADDR tokens, GM_ADDR weights, GM_ADDR starts,        \
        GM_ADDR output_gradient, GM_ADDR rows_gradient, GM_ADDR workspace, GM_ADDR tiling                                      \
    ) {                                                                                                                        \
        KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);                                                                        \
        turbogr::ascend::negative_backward<TYPE>(                                                                              \
            {gradient, output, rows, index, tokens, weights, starts, output_gradient, rows_gradient}, workspace, tiling);      \
    }

TURBOGR_NEGATIVE_BACKWARD(negative_logits_backward_float, float)
TURBOGR_NEGATIVE_BACKWARD(negative_logits_backward_half, half)
TURBOGR_NEGATIVE_BACKWARD(negative_logits_backward_bfloat16, bfloat16_t)
