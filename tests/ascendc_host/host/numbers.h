// Numbers of 16 bits as the device knows them, and how numbers are rounded. See ../README.md.
#pragma once

#include <algorithm>
#include <cmath>
#include <concepts>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

using half = _Float16;

// The upper half of a float's bits. The device's scalar unit does not calculate with it, so both ways are explicit here.
struct bfloat16_t {
    uint16_t bits;

    bfloat16_t() = default;
    // To the nearest, ties to even; a NaN stays one.
    explicit bfloat16_t(float x) {
        uint32_t word;
        std::memcpy(&word, &x, sizeof word);
        bits = x == x ? static_cast<uint16_t>((word + 0x7fff + ((word >> 16) & 1)) >> 16) : uint16_t{0x7fc0};
    }
    explicit operator float() const {
        const uint32_t word = static_cast<uint32_t>(bits) << 16;
        float x;
        std::memcpy(&x, &word, sizeof x);
        return x;
    }
};

namespace AscendC {

enum class RoundMode { CAST_NONE = 0, CAST_RINT, CAST_FLOOR, CAST_CEIL, CAST_ROUND, CAST_TRUNC };

inline float ToFloat(const bfloat16_t& x) { return static_cast<float>(x); }
inline bfloat16_t ToBfloat16(const float& x) { return bfloat16_t(x); }

}  // namespace AscendC

namespace host {

template <class T>
concept Narrow = std::same_as<T, half> || std::same_as<T, bfloat16_t>;

// Narrow numbers are calculated with as float, others as themselves.
template <class T>
using Wide = std::conditional_t<Narrow<T>, float, T>;

template <class T>
Wide<T> widened(T x) {
    return static_cast<Wide<T>>(x);
}

// The distance of numbers of type T around x, where T has fewer digits than float.
template <Narrow T>
float spacing(float x) {
    constexpr int digits = std::same_as<T, half> ? 11 : 8, least = std::same_as<T, half> ? -13 : -125;
    int exponent;
    std::frexp(x, &exponent);
    return std::ldexp(1.0f, std::max(exponent, least) - digits);
}

inline float rounded(float x, AscendC::RoundMode mode) {
    switch (mode) {
        case AscendC::RoundMode::CAST_FLOOR: return std::floor(x);
        case AscendC::RoundMode::CAST_CEIL: return std::ceil(x);
        case AscendC::RoundMode::CAST_ROUND: return std::round(x);
        case AscendC::RoundMode::CAST_TRUNC: return std::trunc(x);
        default: return std::nearbyint(x);
    }
}

// From float to T: numbers with fewer digits are rounded as `mode` says, integers and half saturate.
template <class T>
T converted(float x, AscendC::RoundMode mode = AscendC::RoundMode::CAST_RINT) {
    if constexpr (std::same_as<T, float>) {
        return mode == AscendC::RoundMode::CAST_NONE ? x : rounded(x, mode);
    } else if constexpr (std::integral<T>) {
        const double y = rounded(x, mode), least = std::numeric_limits<T>::min(), largest = std::numeric_limits<T>::max();
        // The largest int64_t is no double: what is at or above the next one saturates, too.
        return y != y ? T{0} : y <= least ? std::numeric_limits<T>::min() : y >= largest ? std::numeric_limits<T>::max() : T(y);
    } else {
        const bool nearest = mode == AscendC::RoundMode::CAST_RINT || mode == AscendC::RoundMode::CAST_NONE;
        if (!nearest && std::isfinite(x) && x != 0) x = rounded(x / spacing<T>(x), mode) * spacing<T>(x);
        if constexpr (std::same_as<T, half>) x = x == x ? std::clamp(x, -65504.0f, 65504.0f) : x;
        return T(x);
    }
}

// The result of a calculation in Wide<T>.
template <class T>
T narrowed(Wide<T> x) {
    return static_cast<T>(x);
}

inline int64_t rounded_up(int64_t x, int64_t unit) { return (x + unit - 1) / unit * unit; }

}  // namespace host
