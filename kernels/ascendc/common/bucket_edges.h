// Buckets of time differences, exactly those of the float64 formula
//
//     bucket(gap) = min(floor(ln(max(gap / unit, 1)) / divisor), count - 1)
//
// on a vector unit that has neither 64-bit integers nor float64. A time is three limbs of 22, 22 and 20 bits as float32, in which
// differences of limbs are exact. A float32 logarithm guesses the bucket or the one below; comparing with the next bucket's
// smallest gap, limb by limb, tells which. The smallest gaps are bisected out of the formula on the host.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

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
    return {static_cast<float>(time & LIMB_MASK), static_cast<float>((time >> LIMB_BITS) & LIMB_MASK),
            static_cast<float>(time >> (2 * LIMB_BITS))};
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

// The smallest gap of each bucket from 1 on, [count - 1]; the largest int64 where no gap reaches a bucket.
inline std::vector<int64_t> bucket_thresholds(int64_t count, double unit, double divisor) {
    std::vector<int64_t> smallest;
    for (int64_t bucket = 1; bucket < count; bucket++) {
        int64_t below = 0, reached = std::numeric_limits<int64_t>::max();
        while (reached - below > 1) {
            const int64_t middle = below + (reached - below) / 2;
            const double gap = std::fmax(static_cast<double>(middle) / unit, 1.0);
            (std::floor(std::log(gap) / divisor) >= static_cast<double>(bucket) ? reached : below) = middle;
        }
        smallest.push_back(reached);
    }
    return smallest;
}

constexpr int64_t edge_stride(int64_t count) { return round_up(count, COPY_BYTES / 4); }

// What kernels read, float [LIMBS, edge_stride(count)]: for each bucket the largest gap below the next one, limb by limb.
inline std::vector<float> bucket_edges(const std::vector<int64_t>& thresholds) {
    const int64_t count = static_cast<int64_t>(thresholds.size()) + 1, stride = edge_stride(count);
    std::vector<float> edges(static_cast<size_t>(LIMBS * stride), 0.0f);
    for (int64_t bucket = 0; bucket < count; bucket++) {
        Limbs limbs{0, 0, LIMB_BASE};  // the last bucket has no next one
        if (bucket + 1 < count) limbs = limbs_of(thresholds[static_cast<size_t>(bucket)] - 1);
        edges[static_cast<size_t>(bucket)] = limbs.low;
        edges[static_cast<size_t>(stride + bucket)] = limbs.middle;
        edges[static_cast<size_t>(2 * stride + bucket)] = limbs.high;
    }
    return edges;
}

}  // namespace turbogr::ascend
