// Calls of the vector unit that take the first `count` elements: arithmetic, functions, casts, fills. Narrow numbers are
// calculated as float and rounded once, which the device may do otherwise.
#pragma once

#include <cmath>
#include <cstdint>

#include "local_memory.h"

namespace host {

// What the vector unit of Atlas A2 calculates with; bfloat16 is cast first.
template <class T>
concept Arithmetic = std::same_as<T, half> || std::same_as<T, float> || std::same_as<T, int16_t> || std::same_as<T, int32_t>;
template <class T>
concept Floating = std::same_as<T, half> || std::same_as<T, float>;
template <class T>
concept Fillable = Arithmetic<T> || std::same_as<T, bfloat16_t> || std::same_as<T, uint16_t> || std::same_as<T, uint32_t>;
template <class T>
concept Shiftable =
    std::same_as<T, int16_t> || std::same_as<T, int32_t> || std::same_as<T, uint16_t> || std::same_as<T, uint32_t>;
template <class T>
concept Bits = std::same_as<T, int16_t> || std::same_as<T, uint16_t>;

// Operands may be the same tensor, but not overlap otherwise.
template <class T, class U>
void check_overlap(const AscendC::LocalTensor<T>& dst, const AscendC::LocalTensor<U>& src, int64_t dst_count,
                   int64_t src_count) {
    const int64_t dst_end = dst.begin() + dst_count * static_cast<int64_t>(sizeof(T));
    const int64_t src_end = src.begin() + src_count * static_cast<int64_t>(sizeof(U));
    require(dst.begin() == src.begin() || dst_end <= src.begin() || src_end <= dst.begin(),
            "source and destination overlap without being the same");
}

inline Core& enter_vector(const char* operation, int64_t Counters::* counter, int64_t count, const Place& place) {
    Core& c = enter(operation, place);
    require(count >= 0, "a negative number of elements: ", count);
    c.counters.*counter += count;
    c.counters.vector_calls++;
    return c;
}

// dst[i] = f(a[i], b[i], ...) for the first `count` elements.
template <class F, class T, class... U>
void elementwise(const char* operation, int64_t Counters::* counter, const Place& place, int64_t count, F f,
                 const AscendC::LocalTensor<T>& dst, const AscendC::LocalTensor<U>&... src) {
    enter_vector(operation, counter, count, place);
    (check_overlap(dst, src, count, count), ...);
    const auto calculate = [&](const U*... from) {
        T* to = dst.write(Unit::Vector, 0, count);
        for (int64_t i = 0; i < count; i++) to[i] = f(from[i]...);
    };
    calculate(src.read(Unit::Vector, 0, count)...);
}

inline float sigmoid(float x) { return 1.0f / (1.0f + std::exp(-x)); }

}  // namespace host

namespace AscendC {

using host::widened;

// x and y are the elements of the sources, wide.
#define HOST_BINARY(NAME, TYPES, COUNTER, RESULT)                                                                             \
    template <TYPES T>                                                                                                        \
    void NAME(const LocalTensor<T>& dst, const LocalTensor<T>& src0, const LocalTensor<T>& src1, int32_t count, HOST_PLACE) { \
        host::elementwise(                                                                                                    \
            #NAME, &host::Counters::COUNTER, place, count,                                                                    \
            [](T a, T b) {                                                                                                    \
                const auto x = widened(a), y = widened(b);                                                                    \
                return static_cast<T>(RESULT);                                                                                \
            },                                                                                                                \
            dst, src0, src1);                                                                                                 \
    }

#define HOST_UNARY(NAME, TYPES, COUNTER, RESULT)                                                 \
    template <TYPES T>                                                                           \
    void NAME(const LocalTensor<T>& dst, const LocalTensor<T>& src, int32_t count, HOST_PLACE) { \
        host::elementwise(                                                                       \
            #NAME, &host::Counters::COUNTER, place, count,                                       \
            [](T a) {                                                                            \
                const auto x = widened(a);                                                       \
                return static_cast<T>(RESULT);                                                   \
            },                                                                                   \
            dst, src);                                                                           \
    }

// s is the scalar.
#define HOST_SCALAR(NAME, TYPES, COUNTER, RESULT)                                                                 \
    template <TYPES T>                                                                                            \
    void NAME(const LocalTensor<T>& dst, const LocalTensor<T>& src, const T& scalar, int32_t count, HOST_PLACE) { \
        const auto s = widened(scalar);                                                                           \
        host::elementwise(                                                                                        \
            #NAME, &host::Counters::COUNTER, place, count,                                                        \
            [s](T a) {                                                                                            \
                const auto x = widened(a);                                                                        \
                return static_cast<T>(RESULT);                                                                    \
            },                                                                                                    \
            dst, src);                                                                                            \
    }

HOST_BINARY(Add, host::Arithmetic, vector_arithmetic, x + y)
HOST_BINARY(Sub, host::Arithmetic, vector_arithmetic, x - y)
HOST_BINARY(Mul, host::Arithmetic, vector_arithmetic, x * y)
HOST_BINARY(Max, host::Arithmetic, vector_arithmetic, x > y ? x : y)
HOST_BINARY(Min, host::Arithmetic, vector_arithmetic, x < y ? x : y)
HOST_BINARY(Div, host::Floating, vector_functions, x / y)
HOST_BINARY(And, host::Bits, vector_arithmetic, x & y)
HOST_BINARY(Or, host::Bits, vector_arithmetic, x | y)
HOST_SCALAR(Adds, host::Arithmetic, vector_arithmetic, x + s)
HOST_SCALAR(Muls, host::Arithmetic, vector_arithmetic, x * s)
HOST_SCALAR(Maxs, host::Arithmetic, vector_arithmetic, x > s ? x : s)
HOST_SCALAR(Mins, host::Arithmetic, vector_arithmetic, x < s ? x : s)
HOST_SCALAR(ShiftLeft, host::Shiftable, vector_arithmetic, static_cast<std::make_unsigned_t<T>>(x) << s)
HOST_SCALAR(ShiftRight, host::Shiftable, vector_arithmetic, x >> s)
HOST_UNARY(Relu, host::Floating, vector_arithmetic, x > 0 ? x : 0)
HOST_UNARY(Abs, host::Floating, vector_arithmetic, std::fabs(x))
HOST_UNARY(Not, host::Bits, vector_arithmetic, ~x)
HOST_UNARY(Exp, host::Floating, vector_functions, std::exp(x))
HOST_UNARY(Ln, host::Floating, vector_functions, std::log(x))
HOST_UNARY(Sqrt, host::Floating, vector_functions, std::sqrt(x))
HOST_UNARY(Rsqrt, host::Floating, vector_functions, 1 / std::sqrt(x))
HOST_UNARY(Reciprocal, host::Floating, vector_functions, 1 / x)
HOST_UNARY(Silu, host::Floating, vector_functions, x * host::sigmoid(x))
HOST_UNARY(Sigmoid, host::Floating, vector_functions, host::sigmoid(x))
HOST_BINARY(Power, host::Floating, vector_functions, std::pow(x, y))
HOST_SCALAR(Power, host::Floating, vector_functions, std::pow(x, s))

#undef HOST_BINARY
#undef HOST_UNARY
#undef HOST_SCALAR

// dst += scalar * src.
template <host::Floating T>
void Axpy(const LocalTensor<T>& dst, const LocalTensor<T>& src, const T& scalar, int32_t count, HOST_PLACE) {
    const float s = static_cast<float>(scalar);
    const auto f = [s](T sum, T x) { return T(widened(sum) + widened(x) * s); };
    host::elementwise("Axpy", &host::Counters::vector_arithmetic, place, count, f, dst, dst, src);
}

// dst += src0 * src1.
template <host::Floating T>
void MulAddDst(const LocalTensor<T>& dst, const LocalTensor<T>& src0, const LocalTensor<T>& src1, int32_t count, HOST_PLACE) {
    const auto f = [](T sum, T x, T y) { return T(widened(sum) + widened(x) * widened(y)); };
    host::elementwise("MulAddDst", &host::Counters::vector_arithmetic, place, count, f, dst, dst, src0, src1);
}

template <host::Fillable T>
void Duplicate(const LocalTensor<T>& dst, const T& value, int32_t count, HOST_PLACE) {
    host::elementwise("Duplicate", &host::Counters::vector_fills, place, count, [value] { return value; }, dst);
}

// first, first + step, first + 2 * step, ...
template <host::Arithmetic T>
void ArithProgression(const LocalTensor<T>& dst, const T first, const T step, const int32_t count, HOST_PLACE) {
    const auto f = [first, step, i = int32_t{0}]() mutable {
        return T(widened(first) + static_cast<host::Wide<T>>(i++) * widened(step));
    };
    host::elementwise("ArithProgression", &host::Counters::vector_fills, place, count, f, dst);
}

template <host::Arithmetic T>
void CreateVecIndex(const LocalTensor<T>& dst, const T& first, uint32_t count, HOST_PLACE) {
    ArithProgression(dst, first, T(1), static_cast<int32_t>(count), place);
}

}  // namespace AscendC

namespace host {

// The ways of rounding that a cast of Atlas A2 has; false where the cast does not exist.
template <class T, class U>
constexpr bool castable(AscendC::RoundMode mode) {
    using enum AscendC::RoundMode;
    const bool rounds = mode != CAST_NONE;
    if constexpr (std::same_as<U, float>) {
        if constexpr (std::same_as<T, half>) return true;
        return (std::same_as<T, float> || std::same_as<T, bfloat16_t> || std::same_as<T, int64_t> || std::same_as<T, int32_t> ||
                std::same_as<T, int16_t>) &&
               rounds;
    }
    if constexpr (std::same_as<U, half>) {
        if constexpr (std::same_as<T, float>) return !rounds;
        return (std::same_as<T, int32_t> || std::same_as<T, int16_t>) && rounds;
    }
    if constexpr (std::same_as<U, bfloat16_t>) {
        return (std::same_as<T, float> && !rounds) || (std::same_as<T, int32_t> && rounds);
    }
    if constexpr (std::same_as<U, int64_t>) return (std::same_as<T, float> && rounds) || (std::same_as<T, int32_t> && !rounds);
    if constexpr (std::same_as<U, int32_t>) {
        if constexpr (std::same_as<T, float>) return true;
        return (std::same_as<T, int64_t> || std::same_as<T, int16_t>) && !rounds;
    }
    if constexpr (std::same_as<U, int16_t>) return std::same_as<T, half> || (std::same_as<T, float> && !rounds);
    return false;
}

}  // namespace host

namespace AscendC {

template <class T, class U>
    requires(host::castable<T, U>(RoundMode::CAST_NONE) || host::castable<T, U>(RoundMode::CAST_RINT))
void Cast(const LocalTensor<T>& dst, const LocalTensor<U>& src, const RoundMode& mode, uint32_t count, HOST_PLACE) {
    using enum RoundMode;
    host::enter("Cast", place);
    host::require(host::castable<T, U>(mode), "the cast does not round in mode ", static_cast<int>(mode));
    const auto f = [mode](U x) {
        if constexpr (std::integral<U> && std::integral<T>) {
            return static_cast<T>(std::clamp<int64_t>(x, std::numeric_limits<T>::min(), std::numeric_limits<T>::max()));
        } else if constexpr (std::integral<U>) {
            return host::converted<T>(static_cast<float>(x), std::same_as<T, float> ? CAST_NONE : mode);
        } else {
            return host::converted<T>(static_cast<float>(x), mode);
        }
    };
    host::elementwise("Cast", &host::Counters::vector_casts, place, count, f, dst, src);
}

}  // namespace AscendC
