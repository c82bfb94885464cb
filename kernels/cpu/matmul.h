// Products of small matrices that lie in a core's cache, and the packing that they need.
#pragma once

#include <algorithm>
#include <type_traits>
#include <utility>

#include "bfloat16.h"
#include "vectors.h"

namespace turbogr {

// An element of a matrix is a float, or an int32_t that holds a pair of bfloat16, which stands for two factors that follow each
// other in the direction of the sum.
template <typename Element>
constexpr int64_t FACTORS = std::is_same_v<Element, float> ? 1 : 2;

// The left factor of a product: rows one after the other, `stride` apart.
template <typename Element>
struct RowMajor {
    const Element* data;
    int64_t stride;
    Element at(int64_t row, int64_t column) const { return data[row * stride + column]; }
    RowMajor from(int64_t row, int64_t column) const { return {data + row * stride + column, stride}; }
};

// The transpose of that: the columns lie one after the other.
template <typename Element>
struct ColumnMajor {
    const Element* data;
    int64_t stride;
    Element at(int64_t row, int64_t column) const { return data[column * stride + row]; }
    ColumnMajor from(int64_t row, int64_t column) const { return {data + column * stride + row, stride}; }
};

// What is known to be zero in a product with a tile on the diagonal, and is left out.
enum class Skip {
    nothing,
    columns_after_row,  // C[m, n] is not wanted for n > m
    inner_after_row,    // A[m, k] is zero for k > m
    inner_before_row,   // A[m, k] is zero for k < m
};

// f(0), f(1), ... f(COUNT - 1) with constants: with loops, GCC keeps arrays of vectors in memory.
template <typename F, int... INDEX>
[[gnu::always_inline]] static inline void unrolled(F f, std::integer_sequence<int, INDEX...>) {
    (f(std::integral_constant<int, INDEX>{}), ...);
}

template <int COUNT, typename F>
[[gnu::always_inline]] static inline void unrolled(F f) {
    unrolled(f, std::make_integer_sequence<int, COUNT>{});
}

template <int ROWS, int VECTORS, typename Left, typename Element>
static inline void register_block(
    int64_t inner, Left a, const Element* b, int64_t b_stride, float* c, int64_t c_stride, bool add
) {
    Vector sums[ROWS * VECTORS];
    unrolled<ROWS * VECTORS>([&](auto x) { sums[x] = Vector{}; });
    for (int64_t k = 0; k < inner; k++) {
        decltype(load(b)) row[VECTORS];
        unrolled<VECTORS>([&](auto v) { row[v] = load(b + k * b_stride + v * LANES); });
        unrolled<ROWS>([&](auto m) {
            const auto factor = repeat(a.at(m, k));
            unrolled<VECTORS>([&](auto v) { sums[m * VECTORS + v] = multiply_add(factor, row[v], sums[m * VECTORS + v]); });
        });
    }
    // Added at the end, what is there need not have arrived before the products can begin.
    unrolled<ROWS * VECTORS>([&](auto x) {
        float* to = c + x / VECTORS * c_stride + x % VECTORS * LANES;
        store(to, add ? load(to) + sums[x] : sums[x]);
    });
}

// One panel of ROWS rows, `vectors` vectors wide.
template <int ROWS, typename Left, typename Element>
static inline void panel(
    int vectors, int64_t inner, Left a, const Element* b, int64_t b_stride, float* c, int64_t c_stride, bool add
) {
    constexpr int WIDEST = ROWS > 6 ? NARROW_VECTORS : MAX_VECTORS;
    int v = 0;
    for (; v + WIDEST <= vectors; v += WIDEST)
        register_block<ROWS, WIDEST>(inner, a, b + v * LANES, b_stride, c + v * LANES, c_stride, add);
    if constexpr (WIDEST > 2)
        if (vectors - v >= 2) {
            if (vectors - v == 3) {
                register_block<ROWS, 3>(inner, a, b + v * LANES, b_stride, c + v * LANES, c_stride, add);
                return;
            }
            register_block<ROWS, 2>(inner, a, b + v * LANES, b_stride, c + v * LANES, c_stride, add);
            v += 2;
        }
    if constexpr (WIDEST > 1)
        if (v < vectors) register_block<ROWS, 1>(inner, a, b + v * LANES, b_stride, c + v * LANES, c_stride, add);
}

template <int ROWS, Skip SKIP, typename Left, typename Element>
static inline int64_t panels(
    int64_t m, int64_t rows, int vectors, int64_t inner, Left a, const Element* b, int64_t b_stride, float* c,
    int64_t c_stride, bool add
) {
    for (; m + ROWS <= rows; m += ROWS) {
        int wanted = vectors;
        int64_t first = 0, end = inner;
        if (SKIP == Skip::columns_after_row) {
            const int needed = static_cast<int>((m + ROWS + LANES - 1) / LANES);
            wanted = needed < vectors ? needed : vectors;
        }
        constexpr int64_t EACH = FACTORS<Element>;
        if (SKIP == Skip::inner_after_row) end = std::min((m + ROWS + EACH - 1) / EACH, inner);
        if (SKIP == Skip::inner_before_row) first = m / EACH;
        panel<ROWS>(wanted, end - first, a.from(m, first), b + first * b_stride, b_stride, c + m * c_stride, c_stride, add);
    }
    return m;
}

// C [rows, vectors * LANES] = A [rows, inner] B [inner, vectors * LANES], added to C if `add`; `inner` counts elements.
template <Skip SKIP, typename Left, typename Element>
static inline void product(
    int64_t rows, int vectors, int64_t inner, Left a, const Element* b, int64_t b_stride, float* c, int64_t c_stride, bool add
) {
    int64_t m = 0;
    if (vectors <= NARROW_VECTORS) m = panels<12, SKIP>(m, rows, vectors, inner, a, b, b_stride, c, c_stride, add);
    m = panels<6, SKIP>(m, rows, vectors, inner, a, b, b_stride, c, c_stride, add);
    m = panels<4, SKIP>(m, rows, vectors, inner, a, b, b_stride, c, c_stride, add);
    panels<1, SKIP>(m, rows, vectors, inner, a, b, b_stride, c, c_stride, add);
}

// `rows` rows of `width` numbers times `factor`, into rows of `padded` floats. What is added is zero, whole rows up to
// `padded_rows` too.
template <typename From>
static inline void pack(
    const From* from, int64_t stride, int64_t rows, int64_t width, float factor, float* to, int64_t padded, int64_t padded_rows
) {
    const int64_t whole = width / LANES * LANES;
    for (int64_t i = 0; i < rows; i++, from += stride, to += padded) {
        for (int64_t c = 0; c < whole; c += LANES) store(to + c, load(from + c) * factor);
        for (int64_t c = whole; c < width; c++) to[c] = static_cast<float>(from[c]) * factor;
        for (int64_t c = width; c < padded; c++) to[c] = 0;
    }
    std::memset(to, 0, sizeof(float) * (padded_rows - rows) * padded);
}

// The reverse: drops the padding.
template <typename To>
static inline void unpack(
    const float* from, int64_t padded, int64_t rows, int64_t width, float factor, To* to, int64_t stride
) {
    const int64_t whole = width / LANES * LANES;
    for (int64_t i = 0; i < rows; i++, from += padded, to += stride) {
        for (int64_t c = 0; c < whole; c += LANES) store(to + c, load(from + c) * factor);
        for (int64_t c = whole; c < width; c++) to[c] = static_cast<To>(from[c] * factor);
    }
}

// From rows of floats to pairs that follow each other in a row: [rows, stride] to [rows, to_stride], of `columns` numbers, a
// multiple of LANES. What is added up to whole vectors of words is zero.
static inline void pair_along(
    const float* from, int64_t stride, int64_t rows, int64_t columns, int32_t* to, int64_t to_stride
) {
    for (int64_t i = 0; i < rows; i++, from += stride, to += to_stride)
        for (int64_t c = 0; c < columns; c += 2 * LANES)
            store(to + c / 2, pairs_along(load(from + c), c + LANES < columns ? load(from + c + LANES) : Vector{}));
}

// From rows of floats to pairs of numbers below each other: [rows, stride] to [(rows + 1) / 2, to_stride].
static inline void pair_across(
    const float* from, int64_t stride, int64_t rows, int64_t columns, int32_t* to, int64_t to_stride
) {
    for (int64_t i = 0; i < rows; i += 2, from += 2 * stride, to += to_stride)
        for (int64_t c = 0; c < columns; c += LANES)
            store(to + c, pairs_across(load(from + c), i + 1 < rows ? load(from + stride + c) : Vector{}));
}

// low = a0 b0 a1 b1 ..., high = the same of the upper halves.
template <typename Any>
static inline void interleave(Any a, Any b, Any& low, Any& high) {
#if defined(__GNUC__) && !defined(__clang__)
    const Lanes lanes = lane_numbers();
    const Lanes order = (lanes >> 1) + (lanes & 1) * LANES;
    low = __builtin_shuffle(a, b, order);
    high = __builtin_shuffle(a, b, order + LANES / 2);
#else
    for (int lane = 0; lane < LANES; lane++) {
        low[lane] = (lane & 1 ? b : a)[lane / 2];
        high[lane] = (lane & 1 ? b : a)[lane / 2 + LANES / 2];
    }
#endif
}

// from [rows, columns] to [columns, rows], both sizes multiples of LANES.
template <typename Element>
static inline void transpose(
    const Element* from, int64_t from_stride, int64_t rows, int64_t columns, Element* to, int64_t to_stride
) {
    for (int64_t i = 0; i < rows; i += LANES)
        for (int64_t c = 0; c < columns; c += LANES) {
            decltype(load(from)) block[LANES], next[LANES];
            for (int r = 0; r < LANES; r++) block[r] = load(from + (i + r) * from_stride + c);
            // log2(LANES) perfect shuffles of the rows transpose a square.
#pragma GCC unroll 4
            for (int step = 1; step < LANES; step *= 2) {
                for (int r = 0; r < LANES / 2; r++) interleave(block[r], block[r + LANES / 2], next[2 * r], next[2 * r + 1]);
                for (int r = 0; r < LANES; r++) block[r] = next[r];
            }
            for (int r = 0; r < LANES; r++) store(to + (c + r) * to_stride + i, block[r]);
        }
}

}  // namespace turbogr
