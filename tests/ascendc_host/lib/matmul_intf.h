// Stands in for AscendC's Matmul on matrices in global memory, row by row (ND). See ../README.md.
#pragma once

#include <cstdint>
#include <vector>

#include "../kernel_operator.h"

// The fields up to singleCoreK decide what is calculated; how the device does it, which the others tell, is not simulated.
struct TCubeTiling {
    int32_t usedCoreNum = 1;
    int32_t M = 0, N = 0, Ka = 0, Kb = 0;
    int32_t singleCoreM = 0, singleCoreN = 0, singleCoreK = 0;
    int32_t baseM = 0, baseN = 0, baseK = 0;
    int32_t depthA1 = 0, depthB1 = 0, stepM = 0, stepN = 0, stepKa = 0, stepKb = 0;
    int32_t isBias = 0, transLength = 0, iterateOrder = 0;
    int32_t shareMode = 0, shareL1Size = 0, shareL0CSize = 0, shareUbSize = 0;
    int32_t dbL0A = 0, dbL0B = 0, dbL0C = 0;
};

enum class CubeFormat { ND = 0, NZ };

namespace AscendC {

template <TPosition position, CubeFormat format, class Type, bool isTrans = false>
struct MatmulType {
    static_assert(position == TPosition::GM && format == CubeFormat::ND,
                  "only row-by-row matrices in global memory are simulated");
    using T = Type;
    static constexpr bool TRANSPOSABLE = isTrans;
};

// C [M, N] = A [M, K] B [K, N], or C += A B. A transposed operand lies as [K, M], or [N, K].
template <class A, class B, class C, class Bias = C>
class Matmul {
    using ElementA = typename A::T;
    using ElementB = typename B::T;
    using ElementC = typename C::T;

  public:
    void Init(const TCubeTiling* tiling, TPipe* = nullptr, HOST_PLACE) {
        host::enter("Matmul::Init", place);
        host::require(tiling->singleCoreM > 0 && tiling->singleCoreN > 0 && tiling->singleCoreK > 0, "the tiling is empty");
        rows_ = tiling->singleCoreM;
        columns_ = tiling->singleCoreN;
        depth_ = tiling->singleCoreK;
        most_rows_ = rows_;
        most_columns_ = columns_;
        most_depth_ = depth_;
        SetOrgShape(tiling->M, tiling->N, tiling->Ka, tiling->Kb, 0, place);
        ready_ = true;
    }
    // The shapes that the operands lie in: M and Ka of A, N and Kb of B, and C's row length where it is not N.
    void SetOrgShape(int m, int n, int ka, int kb, int kc = 0, HOST_PLACE) {
        host::enter("Matmul::SetOrgShape", place);
        host::require(m > 0 && n > 0 && ka > 0 && kb > 0 && kc >= 0, "shapes must be positive");
        m_ = m;
        n_ = n;
        ka_ = ka;
        kb_ = kb;
        row_of_c_ = kc > 0 ? kc : n;
    }
    void SetOrgShape(int m, int n, int k, HOST_PLACE) { SetOrgShape(m, n, k, k, 0, place); }
    // What one IterateAll calculates; at most what the tiling was made for.
    void SetSingleShape(int m, int n, int k, HOST_PLACE) {
        host::enter("Matmul::SetSingleShape", place);
        SetTail(m, n, k, place);
    }
    void SetTail(int m = -1, int n = -1, int k = -1, HOST_PLACE) {
        host::enter("Matmul::SetTail", place);
        if (m != -1) rows_ = m;
        if (n != -1) columns_ = n;
        if (k != -1) depth_ = k;
        host::require(rows_ > 0 && columns_ > 0 && depth_ > 0, "a product without elements");
        host::require(rows_ <= most_rows_ && columns_ <= most_columns_ && depth_ <= most_depth_, "a product of ", rows_, " x ",
                      depth_, " x ", columns_, ": the tiling was made for ", most_rows_, " x ", most_depth_, " x ",
                      most_columns_);
    }
    void SetTensorA(const GlobalTensor<ElementA>& a, bool transposed = false, HOST_PLACE) {
        host::enter("Matmul::SetTensorA", place);
        host::require(!transposed || A::TRANSPOSABLE, "A's type does not allow it to be transposed");
        a_ = a;
        a_transposed_ = transposed;
        has_a_ = true;
    }
    void SetTensorB(const GlobalTensor<ElementB>& b, bool transposed = false, HOST_PLACE) {
        host::enter("Matmul::SetTensorB", place);
        host::require(!transposed || B::TRANSPOSABLE, "B's type does not allow it to be transposed");
        b_ = b;
        b_transposed_ = transposed;
        has_b_ = true;
    }

    // atomic: 0 writes C, 1 adds to it. Without `sync` it returns before the product is done, and `wait` says that
    // WaitIterateAll follows; the stand-in calculates at once, and throws where the kernel touches operands or result too
    // early.
    template <bool sync = true>
    void IterateAll(const GlobalTensor<ElementC>& to, uint8_t atomic = 0, bool sequential = false, bool wait = false,
                    bool fake = false, HOST_PLACE) {
        host::Core& c = host::enter("Matmul::IterateAll", place);
        host::require(ready_, "Init comes first");
        host::require(has_a_ && has_b_, "an operand is not set");
        host::require(atomic <= 1, "only adding is simulated");
        host::require(!sequential && !fake, "only results in place are simulated");
        host::require(!pending_, "WaitIterateAll was not called for the last product");
        pending_ = !sync && wait;
        product_ = ++c.products;
        const std::vector<float> a =
            operand(a_, a_transposed_ ? depth_ : rows_, a_transposed_ ? rows_ : depth_, a_transposed_ ? m_ : ka_);
        const std::vector<float> b =
            operand(b_, b_transposed_ ? columns_ : depth_, b_transposed_ ? depth_ : columns_, b_transposed_ ? kb_ : n_);
        c.counters.matmuls++;
        c.counters.cube_multiply_adds += int64_t{rows_} * columns_ * depth_;
        c.counters.bytes_matmul_operands += static_cast<int64_t>(a.size() * sizeof(ElementA) + b.size() * sizeof(ElementB));
        c.counters.bytes_matmul_results += int64_t{rows_} * columns_ * static_cast<int64_t>(sizeof(ElementC));
        const std::vector<float> columns = b_transposed_ ? transposed(b, columns_, depth_) : b;
        std::vector<float> row(static_cast<size_t>(columns_));
        host::require(columns_ <= row_of_c_, "the result's rows of ", columns_, " elements do not fit into rows of ",
                      row_of_c_);
        for (int i = 0; i < rows_; i++) {
            std::fill(row.begin(), row.end(), 0.0f);
            for (int k = 0; k < depth_; k++) {
                const float x = a_transposed_ ? a[static_cast<size_t>(k) * rows_ + i] : a[static_cast<size_t>(i) * depth_ + k];
                const float* y = columns.data() + static_cast<size_t>(k) * columns_;
                for (int j = 0; j < columns_; j++) row[j] += x * y[j];
            }
            store(c, to, int64_t{i} * row_of_c_, row, atomic != 0);
        }
        if (sync) settle(c);
    }
    void WaitIterateAll(HOST_PLACE) {
        host::Core& c = host::enter("Matmul::WaitIterateAll", place);
        host::require(pending_, "there is no product to wait for");
        pending_ = false;
        settle(c);
    }
    void End(HOST_PLACE) {
        host::enter("Matmul::End", place);
        host::require(!pending_, "WaitIterateAll was not called for the last product");
    }

  private:
    // The last product is done, and with it all before.
    void settle(host::Core& c) {
        std::erase_if(c.pending, [this](const host::Pending& p) { return p.product <= product_; });
    }

    void keep(const void* address, int64_t bytes, bool result) {
        const uintptr_t begin = reinterpret_cast<uintptr_t>(address);
        host::core().pending.push_back({begin, begin + static_cast<uintptr_t>(bytes), result, product_});
    }

    template <class T>
    std::vector<float> operand(const GlobalTensor<T>& from, int rows, int columns, int row_length) {
        host::require(columns <= row_length, "an operand's rows of ", columns, " elements lie in rows of ", row_length);
        std::vector<float> x(static_cast<size_t>(rows) * columns);
        for (int64_t i = 0; i < rows; i++) {
            const T* row = from.read(host::Unit::Cube, i * row_length, columns);
            keep(row, columns * static_cast<int64_t>(sizeof(T)), false);
            for (int64_t j = 0; j < columns; j++) x[i * columns + j] = static_cast<float>(row[j]);
        }
        return x;
    }
    static std::vector<float> transposed(const std::vector<float>& x, int rows, int columns) {
        std::vector<float> y(x.size());
        for (int64_t i = 0; i < rows; i++) {
            for (int64_t j = 0; j < columns; j++) y[j * rows + i] = x[i * columns + j];
        }
        return y;
    }
    void store(host::Core& c, const GlobalTensor<ElementC>& to, int64_t first, const std::vector<float>& row, bool add) {
        const int64_t count = static_cast<int64_t>(row.size());
        ElementC* y = to.write(host::Unit::Cube, first, count, add ? host::Access::Kind::Atomic : host::Access::Kind::Write);
        keep(y, count * static_cast<int64_t>(sizeof(ElementC)), true);
        if (!add) {
            for (int64_t j = 0; j < count; j++) y[j] = host::narrowed<ElementC>(row[j]);
            return;
        }
        std::lock_guard lock(host::regions().atomic);
        for (int64_t j = 0; j < count; j++) y[j] = host::narrowed<ElementC>(static_cast<float>(y[j]) + row[j]);
        c.counters.atomic_elements += count;
    }

    GlobalTensor<ElementA> a_;
    GlobalTensor<ElementB> b_;
    bool a_transposed_ = false, b_transposed_ = false, has_a_ = false, has_b_ = false, ready_ = false, pending_ = false;
    int rows_ = 0, columns_ = 0, depth_ = 0, most_rows_ = 0, most_columns_ = 0, most_depth_ = 0;
    int64_t product_ = 0;  // the last one
    int m_ = 0, n_ = 0, ka_ = 0, kb_ = 0, row_of_c_ = 0;
};

}  // namespace AscendC

namespace matmul {
using AscendC::Matmul;
using AscendC::MatmulType;
}  // namespace matmul

// Objects and tilings in turn.
#define REGIST_MATMUL_OBJ(pipe, workspace, ...) host::initialise(pipe, __VA_ARGS__)

namespace host {

inline void initialise(AscendC::TPipe*) {}

template <class Object, class... More>
void initialise(AscendC::TPipe* pipe, Object& object, const TCubeTiling* tiling, More&&... more) {
    object.Init(tiling, pipe);
    initialise(pipe, more...);
}

}  // namespace host
