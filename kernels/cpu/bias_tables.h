// The bias of attention scores that comes from tables, as the kernels are given it: part of their C interfaces
// (turbogr/ops/hstu_native.py mirrors the struct).
#pragma once

#include <cstdint>

extern "C" {

// bias(i, j) = position_bias[i - j] + time_bias[bucket(|query_times[i] - key_times[j]|)]; either table may be missing.
struct TurbogrBias {
    const float* position_bias;  // [at least the longest sequence] by distance, or null
    const float* time_bias;      // [time_count], or null: then what follows is not read
    int64_t time_count;
    const int64_t* thresholds;               // [time_count - 1] smallest gap of each bucket from 1 on, rising
    const int64_t *query_times, *key_times;  // [T]
    double time_unit, time_divisor;          // of the formula that the thresholds come from
};
}
