// Kernel side: matrix products of the cube unit on operands in global memory.
#pragma once

#include "kernel_operator.h"
#include "lib/matmul_intf.h"

#include "cube_shape.h"

namespace turbogr::ascend {

template <typename E, bool TRANSPOSED_A, bool TRANSPOSED_B>
struct Product {
    static constexpr bool A = TRANSPOSED_A, B = TRANSPOSED_B;
    using Element = E;
    using Type = AscendC::Matmul<
        AscendC::MatmulType<AscendC::TPosition::GM, CubeFormat::ND, E, TRANSPOSED_A>,
        AscendC::MatmulType<AscendC::TPosition::GM, CubeFormat::ND, E, TRANSPOSED_B>,
        AscendC::MatmulType<AscendC::TPosition::GM, CubeFormat::ND, float>>;
};

// One object for one product after another, none larger than its CubeShape.
__aicore__ inline TCubeTiling cube_tiling(const CubeShape& shape) {
    TCubeTiling t{};
    t.usedCoreNum = 1;
    t.M = t.singleCoreM = shape.m;
    t.N = t.singleCoreN = shape.n;
    t.Ka = t.Kb = t.singleCoreK = shape.k;
    t.baseM = shape.base_m;
    t.baseN = shape.base_n;
    t.baseK = shape.base_k;
    t.depthA1 = t.depthB1 = 1;
    t.stepM = t.stepN = t.stepKa = t.stepKb = 1;
    t.dbL0A = t.dbL0B = 2;
    t.dbL0C = 1;
    return t;
}

// A matrix in global memory as it is stored, rows `stride` elements apart.
template <typename T>
struct Matrix {
    AscendC::GlobalTensor<T> data;
    int64_t stride;
};

// Begins C [m, n] = A [m, k] B [k, n], or C += A B, and returns; WaitIterateAll comes before the object's next product.
template <typename P>
__aicore__ inline void post(
    typename P::Type& product, const Matrix<typename P::Element>& a, const Matrix<typename P::Element>& b, const Matrix<float>& c,
    int64_t m, int64_t n, int64_t k, bool add
) {
    product.SetOrgShape(
        static_cast<int>(P::A ? a.stride : m), static_cast<int>(P::B ? n : b.stride), static_cast<int>(P::A ? k : a.stride),
        static_cast<int>(P::B ? b.stride : k), static_cast<int>(c.stride));
    product.SetTensorA(a.data, P::A);
    product.SetTensorB(b.data, P::B);
    product.SetSingleShape(static_cast<int>(m), static_cast<int>(n), static_cast<int>(k));
    product.template IterateAll<false>(c.data, add ? 1 : 0, false, true);
}

}  // namespace turbogr::ascend
