// Shapes of matrix products for the cube unit: what the high-level Matmul wants to be told, computed without CANN's tiling
// library. The kernel copies them into its TCubeTiling.
#pragma once

#include <cstdint>

#include "align.h"

namespace turbogr::ascend {

constexpr int64_t L0A_BYTES = 64 * 1024, L0B_BYTES = 64 * 1024, L0C_BYTES = 128 * 1024, L1_BYTES = 512 * 1024;

// C [m, n] = A [m, k] B [k, n], at most, one call at a time; base sizes are those of one step of the cube.
struct CubeShape {
    int32_t m, n, k;
    int32_t base_m, base_n, base_k;
};

// Base sizes are multiples of 16. Both buffers of L0A hold [base_m, base_k], of L0B [base_k, base_n]; L0C holds [base_m, base_n]
// in float32; L1 holds one of each operand for every object.
inline CubeShape cube_shape(int64_t m, int64_t n, int64_t k, int64_t element_bytes) {
    const int64_t base_m = smaller(round_up(m, 16), 128), base_n = smaller(round_up(n, 16), 128);
    const int64_t most_k = smaller(L0A_BYTES / 2 / (base_m * element_bytes), L0B_BYTES / 2 / (base_n * element_bytes));
    const int64_t base_k = smaller(round_up(k, 16), most_k / 16 * 16);
    return {static_cast<int32_t>(m), static_cast<int32_t>(n), static_cast<int32_t>(k), static_cast<int32_t>(base_m),
            static_cast<int32_t>(base_n), static_cast<int32_t>(base_k)};
}

inline bool cube_shape_fits(const CubeShape& s, int64_t element_bytes, int64_t objects) {
    const int64_t a = int64_t{s.base_m} * s.base_k * element_bytes, b = int64_t{s.base_n} * s.base_k * element_bytes;
    return s.base_k > 0 && 2 * a <= L0A_BYTES && 2 * b <= L0B_BYTES && int64_t{4} * s.base_m * s.base_n <= L0C_BYTES &&
           objects * (a + b) <= L1_BYTES;
}

}  // namespace turbogr::ascend
