// Random bits that are a function of a seed, a row and a column: nothing is drawn in order, so any thread can have any
// element's, and backward has forward's again. turbogr/ops/dropout.py computes the same bits with PyTorch.
#pragma once

#include "vectors.h"

namespace turbogr {

typedef uint32_t Words __attribute__((vector_size(4 * LANES)));

// The keys of a row.
struct Keys {
    uint32_t first, second;
};

// SplitMix64 (Steele, Lea and Flood 2014): no two rows have the same pair of keys.
static inline Keys keys_of(uint64_t seed, uint64_t row) {
    uint64_t z = seed + (row + 1) * 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    z ^= z >> 31;
    return {static_cast<uint32_t>(z), static_cast<uint32_t>(z >> 32)};
}

// The mixing function triple32 of the hash prospector (Wellons 2018). The second key, added half-way, makes two rows two
// different functions: with the first alone they would be one function read in two orders.
static inline Words random_bits(Words column, Keys keys) {
    Words x = column ^ keys.first;
    x ^= x >> 17;
    x *= 0xed5ad4bbu;
    x ^= x >> 11;
    x *= 0xac4c1b51u;
    x += keys.second;
    x ^= x >> 15;
    x *= 0x31848babu;
    return x ^ (x >> 14);
}

// Dropout: an element is kept, and multiplied with `scale`, if its bits are at least `threshold`.
struct Mask {
    uint64_t seed;
    uint32_t threshold;
    float scale;
};

// What the LANES elements from `column` on are multiplied with.
static inline Vector factors(const Mask& mask, Keys keys, int64_t column) {
    const Words columns = reinterpret_cast<Words>(lane_numbers()) + static_cast<uint32_t>(column);
    return random_bits(columns, keys) >= mask.threshold ? broadcast(mask.scale) : Vector{};
}

// The same for one row; a threshold of 0 is no dropout.
class RowFactors {
  public:
    RowFactors(const Mask& mask, int64_t row) : mask_(mask), keys_(keys_of(mask.seed, static_cast<uint64_t>(row))) {}
    Vector at(int64_t column) const { return mask_.threshold == 0 ? broadcast(1.0f) : factors(mask_, keys_, column); }

  private:
    Mask mask_;
    Keys keys_;
};

}  // namespace turbogr
