// FuXi-gamma's weight of a time difference, amplitude * decay^((gap / unit)^exponent), and its gradient.
#pragma once

#include <algorithm>
#include <cmath>

#include "exponential.h"
#include "time_buckets.h"
#include "vectors.h"

namespace turbogr {

// ln(x) of positive normal numbers, to an ulp or two.
static inline Vector logarithm(Vector x) {
    const Lanes root_half = Lanes{} + 0x3f3504f3;
    const Lanes above = as_integers(x) - root_half;
    const Vector exponent = __builtin_convertvector(above >> 23, Vector);
    const Vector t = as_floats((above & 0x007fffff) + root_half) - 1.0f;  // in [sqrt(1/2) - 1, sqrt(2) - 1]
    Vector p = t * 7.0376836292e-2f - 1.1514610310e-1f;
    p = p * t + 1.1676998740e-1f;
    p = p * t - 1.2420140846e-1f;
    p = p * t + 1.4249322787e-1f;
    p = p * t - 1.6668057665e-1f;
    p = p * t + 2.0000714765e-1f;
    p = p * t - 2.4999993993e-1f;
    p = p * t + 3.3333331174e-1f;
    const Vector square = t * t;
    // ln(2) in two parts, of which the exponent times the first is exact.
    const Vector low = p * t * square - exponent * 2.12194440e-4f - square * 0.5f;
    return (t + low) + exponent * 0.693359375f;
}

class TimeFunction {
  public:
    // `numbers` are amplitude, decay and exponent.
    TimeFunction(const double* numbers, double unit)
        : amplitude_(numbers[0]),
          decay_(numbers[1] < SMALLEST_DECAY ? SMALLEST_DECAY : numbers[1]),
          exponent_(static_cast<float>(numbers[2])),
          log_decay_(static_cast<float>(std::log(decay_))),
          inverse_unit_(static_cast<float>(1 / unit)) {}

    // decayed = decay^power, power = x^exponent, log = ln(x) of x = gap / unit; at a gap of 0 they are 1, 0 and 0.
    struct Parts {
        Vector decayed, power, log;
    };

    Parts parts(Vector gap) const {
        const Lanes none = gap == 0.0f;
        const Vector log = logarithm(none ? broadcast(1.0f) : gap * inverse_unit_);
        // Held where its products stay finite; the order of the arguments hands a NaN on.
        const Vector power = none ? Vector{} : exponential(minimum(broadcast(LARGEST_LOG_POWER), log * exponent_));
        return {exponential(power * log_decay_), power, log};
    }

    float amplitude() const { return static_cast<float>(amplitude_); }

    // Sums over pairs of a weight's gradient times decayed, times power, times log: what the gradient of the numbers is made of.
    struct Sums {
        double plain, by_power, by_log;
    };

    void gradient(const Sums& sums, double* numbers) const {
        numbers[0] = sums.plain;
        numbers[1] = amplitude_ / decay_ * sums.by_power;
        numbers[2] = amplitude_ * std::log(decay_) * sums.by_log;
    }

  private:
    static constexpr double SMALLEST_DECAY = 1e-30;
    static constexpr float LARGEST_LOG_POWER = 69.0f;

    double amplitude_, decay_;
    float exponent_, log_decay_, inverse_unit_;
};

// |query - key| of one row and `count` keys from `first` on; anything finite up to a whole vector.
static inline void gaps_of_row(const SequenceTimes& times, int64_t row, int64_t first, int64_t count, float* gaps) {
    const Times keys = times.keys.from(first), query = times.queries.from(row);
    for (int64_t j = 0; j < count; j += LANES) store(gaps + j, distances<false>(keys.relative + j, query.relative));
    if (times.exact_differences) return;
    for (int64_t j = 0; j < count; j++) gaps[j] = static_cast<float>(gap_of(query.exact[0], keys.exact[j]));
}

}  // namespace turbogr
