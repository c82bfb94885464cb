// float16 (IEEE 754 binary16), read into float32; every number of it is one of those.
#pragma once

#include "vectors.h"

#if defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace turbogr {

struct Float16 {
    uint16_t bits;
};

static inline Vector load(const Float16* from) {
#if defined(__AVX512F__)
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
#elif defined(__F16C__)
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
#elif defined(__aarch64__)
    return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(&from->bits)));
#else
    typedef uint16_t ShortLanes __attribute__((vector_size(2 * LANES)));
    ShortLanes narrow;
    std::memcpy(&narrow, from, sizeof narrow);
    const Lanes bits = __builtin_convertvector(narrow, Lanes), fraction = bits & 0x3ff, exponent = bits & 0x7c00;
    const int32_t rebias = (127 - 15) << 23;
    Lanes word = ((bits & 0x7fff) << 13) + rebias;
    word = exponent == 0x7c00 ? word + rebias : word;  // infinite or no number: the largest exponent here, too
    // Numbers below the smallest normal one are counted in steps of 2^-24: this reads them where tiny floats count as zero, too.
    word = exponent == 0 ? as_integers(__builtin_convertvector(fraction, Vector) * 0x1p-24f) : word;
    return as_floats(word | (bits & 0x8000) << 16);
#endif
}

}  // namespace turbogr
