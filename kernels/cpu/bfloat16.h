// bfloat16, the upper half of a float32's bits: tensors of it, and products of pairs of such numbers.
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
#if defined(__AVX512F__)  // GCC widens halves of a vector, and puts them together
    const __m512i words = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
    return as_floats(reinterpret_cast<Lanes>(words) << 16);
#elif defined(__AVX2__)
    const __m256i words = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
    return as_floats(reinterpret_cast<Lanes>(words) << 16);
#else
    ShortLanes bits;
    std::memcpy(&bits, from, sizeof bits);
    return as_floats(__builtin_convertvector(bits, Lanes) << 16);
#endif
}

// The bits to the nearest, ties to even, in the lower half of each lane.
static inline UnsignedLanes rounded(Vector x) {
    UnsignedLanes words;
    std::memcpy(&words, &x, sizeof words);
    words = (words + 0x7fff + ((words >> 16) & 1)) >> 16;
    return x == x ? words : UnsignedLanes{} + 0x7fc0;
}

static inline void store(BFloat16* to, Vector x) {
    const ShortLanes bits = __builtin_convertvector(rounded(x), ShortLanes);
    std::memcpy(to, &bits, sizeof bits);
}

// A pair of numbers is a word, the first in its lower half. Pairs of (even[lane], odd[lane]):
static inline Lanes pairs_across(Vector even, Vector odd) {
    return reinterpret_cast<Lanes>(rounded(odd) << 16 | rounded(even));
}

// Pairs of (x[0], x[1]), (x[2], x[3]), ..., where x is all of `first` and then all of `second`:
static inline Lanes pairs_along(Vector first, Vector second) {
#if defined(__AVX512BF16__)
    return reinterpret_cast<Lanes>(_mm512_cvtne2ps_pbh(second, first));
#else
    BFloat16 numbers[2 * LANES];
    store(numbers, first);
    store(numbers + LANES, second);
    Lanes x;
    std::memcpy(&x, numbers, sizeof x);
    return x;
#endif
}

static inline Lanes repeat(int32_t pair) { return Lanes{} + pair; }
static inline Vector repeat(float x) { return broadcast(x); }

// sum + a.first * b.first + a.second * b.second in each lane, in float32.
static inline Vector multiply_add(Lanes a, Lanes b, Vector sum) {
#if defined(__AVX512BF16__)
    return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b));
#else
    const int32_t upper = static_cast<int32_t>(0xffff0000u);
    sum += as_floats(a << 16) * as_floats(b << 16);
    return sum + as_floats(a & upper) * as_floats(b & upper);
#endif
}

static inline Vector multiply_add(Vector a, Vector b, Vector sum) { return a * b + sum; }

}  // namespace turbogr
