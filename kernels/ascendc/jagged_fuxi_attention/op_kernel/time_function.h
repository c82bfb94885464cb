// Kernel side: FuXi-gamma's weight of a time difference, amplitude * decay^((gap / unit)^exponent), on the vector unit, and
// sums for the gradient of its three numbers. kernels/cpu/time_function.h is the same for CPUs.
#pragma once

#include "kernel_operator.h"

#include "../../common/strips.h"
#include "../op_host/jagged_fuxi_attention_tiling.h"

namespace turbogr::ascend {

// decayed = decay^power, power = x^exponent, log = ln(x) of x = gap / unit. At a gap of 0 decayed is 1 and power 0.
struct TimeFunctionParts {
    AscendC::LocalTensor<float> decayed, power, log;
};

class TimeFunction {
  public:
    // numbers: float32 [3], amplitude, decay and exponent.
    __aicore__ inline void init(AscendC::TPipe* pipe, GM_ADDR numbers, float inverse_unit) {
        inverse_unit_ = inverse_unit;
        constexpr int64_t room = COPY_ELEMENTS<float>;
        pipe->InitBuffer(buffer_, static_cast<uint32_t>(2 * COPY_BYTES));
        const auto given = buffer_.Get<float>(), logs = given[room];
        AscendC::GlobalTensor<float> from;
        from.SetGlobalBuffer(reinterpret_cast<__gm__ float*>(numbers), static_cast<uint64_t>(FUNCTION_NUMBERS));
        load_rows(given, room, from, 0, 1, FUNCTION_NUMBERS);
        fence<AscendC::HardEvent::MTE2_V>(pipe);
        // The scalar unit has no logarithm.
        AscendC::Maxs(logs, given, SMALLEST_DECAY, static_cast<int32_t>(room));
        AscendC::Ln(logs, logs, static_cast<int32_t>(room));
        fence<AscendC::HardEvent::V_S>(pipe);
        fence<AscendC::HardEvent::MTE2_S>(pipe);
        amplitude_ = given.GetValue(0);
        decay_ = given.GetValue(1);
        exponent_ = given.GetValue(2);
        log_decay_ = logs.GetValue(1);
    }

    __aicore__ inline float amplitude() const { return amplitude_; }

    // parts.decayed holds time differences, whole numbers; the parts take their places.
    __aicore__ inline void evaluate(
        const TimeFunctionParts& parts, const AscendC::LocalTensor<float>& scratch, int32_t n
    ) const {
        using namespace AscendC;
        const LocalTensor<float>&gap = parts.decayed, &some = scratch;
        Abs(gap, gap, n);
        Mins(some, gap, 1.0f, n);  // 0 at a gap of 0, else 1
        Maxs(gap, gap, 1.0f, n);
        Muls(gap, gap, inverse_unit_, n);
        Ln(parts.log, gap, n);
        Muls(parts.power, parts.log, exponent_, n);
        Mins(parts.power, parts.power, LARGEST_LOG_POWER, n);  // so that its products stay finite
        Exp(parts.power, parts.power, n);
        Mul(parts.power, parts.power, some, n);
        Muls(parts.decayed, parts.power, log_decay_, n);
        Exp(parts.decayed, parts.decayed, n);
    }

    // What makes the gradient of a number of the sums over pairs of a weight's gradient times decayed, times power, times log.
    __aicore__ inline float factor(int64_t number) const {
        if (number == 0) return 1.0f;
        return amplitude_ * (number == 1 ? 1.0f / (decay_ < SMALLEST_DECAY ? SMALLEST_DECAY : decay_) : log_decay_);
    }

  private:
    static constexpr float SMALLEST_DECAY = 1e-30f, LARGEST_LOG_POWER = 69.0f;

    float inverse_unit_, amplitude_, decay_, exponent_, log_decay_;
    AscendC::TBuf<AscendC::TPosition::VECCALC> buffer_;
};

// A core's three sums over pairs, TILE partial sums each, in local memory until the core is done.
class FunctionSums {
  public:
    __aicore__ inline void init(AscendC::TPipe* pipe) {
        pipe_ = pipe;
        pipe->InitBuffer(buffer_, static_cast<uint32_t>(FUNCTION_SUMS * 4));
        sums_ = buffer_.Get<float>();
        AscendC::Duplicate(sums_, 0.0f, static_cast<int32_t>(FUNCTION_SUMS));
    }

    // grads: of the weights of `rows` rows of TILE pairs, 0 where there is no pair; work: two strips.
    __aicore__ inline void add(
        const AscendC::LocalTensor<float>& grads, const TimeFunctionParts& parts, const AscendC::LocalTensor<float>& work,
        const AscendC::LocalTensor<float>& more_work, int64_t rows
    ) {
        using namespace AscendC;
        const int32_t n = static_cast<int32_t>(rows * TILE);
        Mul(work, grads, parts.decayed, n);
        Mul(more_work, work, parts.power, n);
        add_rows(0, work, rows);
        Mul(work, more_work, parts.log, n);
        add_rows(1, more_work, rows);
        add_rows(2, work, rows);
    }

    // To the core's place in global memory, float32 [FUNCTION_NUMBERS, TILE].
    __aicore__ inline void store(GM_ADDR to) {
        AscendC::GlobalTensor<float> place;
        place.SetGlobalBuffer(reinterpret_cast<__gm__ float*>(to), static_cast<uint64_t>(FUNCTION_SUMS));
        fence<AscendC::HardEvent::V_MTE3>(pipe_);
        AscendC::DataCopy(place, sums_, static_cast<uint32_t>(FUNCTION_SUMS));
    }

  private:
    // Halves are added until one row is left; `x` is overwritten.
    __aicore__ inline void add_rows(int64_t number, const AscendC::LocalTensor<float>& x, int64_t rows) {
        while (rows > 1) {
            const int64_t half = ceil_divide(rows, 2);
            AscendC::Add(x, x, x[half * TILE], static_cast<int32_t>((rows - half) * TILE));
            rows = half;
        }
        const auto sum = sums_[number * TILE];
        AscendC::Add(sum, sum, x, TILE);
    }

    AscendC::TPipe* pipe_;
    AscendC::TBuf<AscendC::TPosition::VECCALC> buffer_;
    AscendC::LocalTensor<float> sums_;
};

}  // namespace turbogr::ascend
