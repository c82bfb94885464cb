// bfloat16 tensors: the upper half of a float32's bits.
#pragma once

#include "vectors.h"

namespace turbogr {

struct BFloat16 {
    uint16_t bits;

    BFloat16() = default;
    // To the nearest, ties to even; a NaN stays one.
    explicit BFloat16(float x) {
        uint32_t word;
        std::memcpy(&word, &x, sizeof word);
        bits = x == x ? static_cast<uint16_t>((word + 0x7fff + ((word >> 16) & 1)) >> 16) : uint16_t{0x7fc0};
    }
    operator float() const {
        const uint32_t word = static_cast<uint32_t>(bits) << 16;
        float x;
        std::memcpy(&x, &word, sizeof x);
        return x;
    }
};

typedef uint16_t ShortLanes __attribute__((vector_size(2 * LANES)));
typedef uint32_t UnsignedLanes __attribute__((vector_size(4 * LANES)));

static inline Vector load(const BFloat16* from) {
    ShortLanes bits;
    std::memcpy(&bits, from, sizeof bits);
    return as_floats(__builtin_convertvector(bits, Lanes) << 16);
}

static inline void store(BFloat16* to, Vector x) {
    UnsignedLanes words;
    std::memcpy(&words, &x, sizeof words);
    words = (words + 0x7fff + ((words >> 16) & 1)) >> 16;
    const ShortLanes bits = __builtin_convertvector(x == x ? words : UnsignedLanes{} + 0x7fc0, ShortLanes);
    std::memcpy(to, &bits, sizeof bits);
}

}  // namespace turbogr
