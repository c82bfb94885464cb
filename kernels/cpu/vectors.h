// Vectors of floats from one source: GCC vector extensions, as wide as the machine that -march=native names.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX__)
#include <immintrin.h>
#endif

namespace turbogr {

#if defined(__AVX512F__)
constexpr int LANES = 16;
constexpr int MAX_VECTORS = 4;  // columns of a register block, in vectors: 32 registers hold 6 x 4 sums
constexpr int NARROW_VECTORS = 2;  // up to so many columns, 12 rows are summed at once
#elif defined(__AVX__)
constexpr int LANES = 8;
constexpr int MAX_VECTORS = 2;  // 16 registers hold 6 x 2 sums
constexpr int NARROW_VECTORS = 1;
#elif defined(__aarch64__)
constexpr int LANES = 4;
constexpr int MAX_VECTORS = 4;
constexpr int NARROW_VECTORS = 2;
#else
constexpr int LANES = 4;
constexpr int MAX_VECTORS = 2;
constexpr int NARROW_VECTORS = 1;
#endif

typedef float Vector __attribute__((vector_size(4 * LANES)));
typedef int32_t Lanes __attribute__((vector_size(4 * LANES)));

constexpr int64_t round_up(int64_t x, int64_t multiple) { return (x + multiple - 1) / multiple * multiple; }

static inline Vector load(const float* from) {
    Vector x;
    std::memcpy(&x, from, sizeof x);
    return x;
}

static inline Lanes load(const int32_t* from) {
    Lanes x;
    std::memcpy(&x, from, sizeof x);
    return x;
}

static inline void store(float* to, Vector x) { std::memcpy(to, &x, sizeof x); }

static inline void store(int32_t* to, Lanes x) { std::memcpy(to, &x, sizeof x); }

static inline Vector broadcast(float x) { return x - Vector{}; }

static inline Lanes as_integers(Vector x) {
    Lanes bits;
    std::memcpy(&bits, &x, sizeof bits);
    return bits;
}

static inline Vector as_floats(Lanes bits) {
    Vector x;
    std::memcpy(&x, &bits, sizeof x);
    return x;
}

static inline Lanes lane_numbers() {
    Lanes x;
    for (int lane = 0; lane < LANES; lane++) x[lane] = lane;
    return x;
}

// The first `count` lanes of x, zero in the others.
static inline Vector first_lanes(Vector x, int64_t count) {
    return lane_numbers() < static_cast<int32_t>(count) ? x : Vector{};
}

// |a[0] - b[0]|, ... or, unless MANY, |a[0] - b[0]|, |a[1] - b[0]|, ... in float64, rounded to float32.
template <bool MANY>
static inline Vector distances(const double* a, const double* b) {
#if defined(__AVX512F__)
    const auto half = [&](int lane) {
        const __m512d other = MANY ? _mm512_loadu_pd(b + lane) : _mm512_set1_pd(*b);
        return _mm512_cvtpd_ps(_mm512_abs_pd(_mm512_loadu_pd(a + lane) - other));
    };
    return _mm512_insertf32x8(_mm512_castps256_ps512(half(0)), half(8), 1);
#else
    Vector x;
    for (int lane = 0; lane < LANES; lane++) x[lane] = static_cast<float>(__builtin_fabs(a[lane] - b[MANY ? lane : 0]));
    return x;
#endif
}

// Lane by lane, -1 where a[lane] <= b and 0 elsewhere.
static inline Lanes at_most(const double* a, double b) {
#if defined(__AVX512F__)
    const auto half = [&](int lane) { return _mm512_cmp_pd_mask(_mm512_loadu_pd(a + lane), _mm512_set1_pd(b), _CMP_LE_OQ); };
    return reinterpret_cast<Lanes>(_mm512_movm_epi32(static_cast<__mmask16>(half(8) << 8 | half(0))));
#else
    Lanes x;
    for (int lane = 0; lane < LANES; lane++) x[lane] = -(a[lane] <= b);
    return x;
#endif
}

static inline bool any(Lanes x) {
#if defined(__AVX512F__)
    return _mm512_test_epi32_mask(reinterpret_cast<__m512i>(x), reinterpret_cast<__m512i>(x)) != 0;
#else
    uint64_t words[sizeof(Lanes) / 8], found = 0;
    std::memcpy(words, &x, sizeof words);
    for (uint64_t word : words) found |= word;
    return found != 0;
#endif
}

static inline float sum(Vector x) {
    float parts[LANES];
    std::memcpy(parts, &x, sizeof x);
    for (int half = LANES / 2; half > 0; half /= 2)
        for (int lane = 0; lane < half; lane++) parts[lane] += parts[lane + half];
    return parts[0];
}

// Lane by lane, that one of the lanes of a and then b, counted from 0.
static inline Vector choose(Vector a, Vector b, Lanes lanes) {
#if defined(__GNUC__) && !defined(__clang__)
    return __builtin_shuffle(a, b, lanes);
#else
    Vector chosen;
    for (int lane = 0; lane < LANES; lane++) chosen[lane] = (lanes[lane] < LANES ? a : b)[lanes[lane] % LANES];
    return chosen;
#endif
}

// Lanes 1, 2, ... of x and then lane 0 of `next`.
static inline Vector move_down(Vector x, Vector next) { return choose(x, next, lane_numbers() + 1); }

static inline Vector maximum(Vector a, Vector b) {
#if defined(__AVX512F__)
    return _mm512_max_ps(a, b);
#elif defined(__AVX__)
    return _mm256_max_ps(a, b);
#else
    return a > b ? a : b;
#endif
}

static inline Vector minimum(Vector a, Vector b) {
#if defined(__AVX512F__)
    return _mm512_min_ps(a, b);
#elif defined(__AVX__)
    return _mm256_min_ps(a, b);
#else
    return a < b ? a : b;
#endif
}

// 1 / (1 + exp(-x)), to 3e-7 relative near 0 and 2e-6 at the ends. The argument is held within +-87, where float32 still has
// normal numbers. A NaN gives some finite number: the callers multiply by x, which hands the NaN on.
static inline Vector sigmoid(Vector x) {
    const Vector bounded = minimum(maximum(x, broadcast(-87.0f)), broadcast(87.0f));
    // exp(-x) = 2^((n + f) / STEPS) with n an integer and |f| <= 1/2: adding 1.5 * 2^23 rounds, and n then stands in the low
    // bits.
    const Vector shifter = broadcast(12582912.0f);
#if defined(__AVX512F__)
    // A table of 2^(n / 16) lies in one register; with an estimated reciprocal this needs 9 of the slots in which products could
    // run, the longer polynomial and the division of the other branch 13.
    constexpr float STEPS = 16;
    const Vector table = {1.0f,       1.04427378f, 1.09050773f, 1.13878863f, 1.18920712f, 1.24185781f, 1.29683955f, 1.35425555f,
                          1.41421356f, 1.47682615f, 1.54221083f, 1.61049033f, 1.68179283f, 1.75625216f, 1.83400809f, 1.91520656f};
    const Vector shifted = bounded * (-1.44269504f * STEPS) + shifter;
    const Vector f = bounded * (-1.44269504f * STEPS) - (shifted - shifter);
    const Vector p = (f * 9.38357275e-4f + 4.33242395e-2f) * f + 1.0f;
    const Vector root = _mm512_permutexvar_ps(reinterpret_cast<__m512i>(shifted), table);
    const Vector denominator = p * as_floats(as_integers(root) + (as_integers(shifted) >> 4 << 23)) + 1.0f;
    const Vector estimate = _mm512_rcp14_ps(denominator);
    return estimate + estimate * (1.0f - denominator * estimate);
#else
    const Vector shifted = bounded * -1.44269504f + shifter;
    const Vector f = bounded * -1.44269504f - (shifted - shifter);
    Vector p = f * 1.32186722e-3f + 9.67169832e-3f;
    p = p * f + 5.55089302e-2f;
    p = p * f + 0.24022238f;
    p = p * f + 0.69314688f;
    p = p * f + 1.0f;
    return 1.0f / (1.0f + as_floats(as_integers(p) + (as_integers(shifted) << 23)));
#endif
}

// log2 of x >= 1, to 1.5e-5 + 2^-23 log2 x: good for a guess that is checked.
static inline Vector log2_roughly(Vector x) {
    const Lanes bits = as_integers(x);
    const Vector exponent = __builtin_convertvector((bits >> 23) - 127, Vector);
    const Vector t = as_floats((bits & 0x007fffff) | 0x3f800000) - 1.0f;
    Vector p = t * 0.043928627f - 0.18983245f;
    p = p * t + 0.41156149f;
    p = p * t - 0.70725346f;
    p = p * t + 1.44159210f;
    return exponent + (p * t + 1.4390930e-5f);
}

}  // namespace turbogr
