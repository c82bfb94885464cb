// Buckets of time differences, exactly those of the float64 formula
//
//     bucket(gap) = min(floor(ln(max(gap / unit, 1)) / divisor), count - 1)
//
// on a vector unit that has neither 64-bit integers nor float64. A time is three limbs of 22, 22 and 20 bits as float32, in which
// differences of limbs are exact. A float32 logarithm guesses the bucket or the one below; comparing with the next bucket's
// smallest gap, limb by limb, tells which. The smallest gaps are bisected out of the formula on the host.
#pragma once

#include <cstdint>

#include "align.h"

namespace turbogr::ascend {

constexpr int LIMB_BITS = 22;
constexpr int64_t LIMB_MASK = (int64_t{1} << LIMB_BITS) - 1;
constexpr float LIMB_BASE = static_cast<float>(LIMB_MASK + 1);
constexpr int64_t LIMBS = 3;

// Of how much the device's logarithm of a float32 gap may be wrong, rounding of the gap included: 1e-4 is 100 times what
// float32 needs.
constexpr double LOGARITHM_ERROR = 1e-4;

struct Limbs {
    float low, middle, high;
};

TURBOGR_SHARED Limbs limbs_of(int64_t time) {
    return {
        static_cast<float>(static_cast<int32_t>(time & LIMB_MASK)),
        static_cast<float>(static_cast<int32_t>((time >> LIMB_BITS) & LIMB_MASK)),
        static_cast<float>(static_cast<int32_t>(time >> (2 * LIMB_BITS)))};
}

// What the kernel needs of the formula.
struct Bucketing {
    int32_t count;        // buckets, or 0: there is no table of times
    float inverse_unit;   // 1 / unit
    float per_logarithm;  // 1 / divisor
    float margin;         // subtracted from a guess, so that it is never above the bucket
};

inline Bucketing bucketing_of(int64_t count, double unit, double divisor) {
    if (count == 0) return {0, 1.0f, 1.0f, 0.0f};
    return {static_cast<int32_t>(count), static_cast<float>(1 / unit), static_cast<float>(1 / divisor),
            static_cast<float>(LOGARITHM_ERROR / divisor)};
}

// Whether guesses are at most one bucket off.
inline bool bucketing_is_exact(double unit, double divisor) {
    return LOGARITHM_ERROR / divisor < 0.45 && unit > 1e-12 && unit < 1e12;
}

// Numbers of a row of `bucket_edges`.
TURBOGR_SHARED constexpr int64_t edge_stride(int64_t count) { return round_up(count, COPY_BYTES / 4); }

}  // namespace turbogr::ascend
