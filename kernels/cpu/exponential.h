// exp on vectors.
#pragma once

#include "vectors.h"

namespace turbogr {

// exp(x) for x <= 88, to 2e-7 relative; 0 below -87, where float32 has no normal numbers left. A NaN stays one.
static inline Vector exponential(Vector x) {
    // exp(x) = 2^n exp(r) with |r| <= ln(2) / 2; ln(2) in two parts, of which n times the first is exact. The order of the
    // arguments hands a NaN on.
    const Vector bounded = maximum(broadcast(-87.0f), x);
    const Vector shifter = broadcast(12582912.0f);  // 1.5 * 2^23: adding it rounds, and n then stands in the low bits
    const Vector shifted = bounded * 1.44269504f + shifter;
    const Vector n = shifted - shifter;
    const Vector r = (bounded - n * 0.693359375f) + n * 2.12194440e-4f;
    Vector p = r * 1.9875691e-4f + 1.3981999e-3f;
    p = p * r + 8.3334519e-3f;
    p = p * r + 4.1665796e-2f;
    p = p * r + 1.6666666e-1f;
    p = p * r + 5.0000001e-1f;
    p = p * (r * r) + (r + 1.0f);
    const Vector result = p * as_floats((as_integers(shifted) << 23) + 0x3f800000);
    return x < -87.0f ? Vector{} : result;
}

}  // namespace turbogr
