// Where buckets of time differences begin, for kernels that find buckets with limbs (limbs.h). Host only.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "limbs.h"

namespace turbogr::ascend {

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
