// Buckets of time differences: exactly those of the float64 formula, which the caller has turned into integer thresholds.
#pragma once

#include <algorithm>

#include "tasks.h"
#include "vectors.h"

namespace turbogr {

// |a - b| as an unsigned number, for any two int64.
static inline uint64_t gap_of(int64_t a, int64_t b) {
    const uint64_t x = static_cast<uint64_t>(a), y = static_cast<uint64_t>(b);
    return a < b ? y - x : x - y;
}

// bucket(gap) is the number of thresholds <= gap; thresholds rise, there are count - 1 of them.
class TimeBuckets {
  public:
    TimeBuckets(const int64_t* thresholds, int64_t count, double unit, double divisor)
        : thresholds_(reinterpret_cast<const uint64_t*>(thresholds)), count_(static_cast<int32_t>(count)) {
        for (int bits = 0; bits <= 64; bits++) {
            const uint64_t smallest = bits == 0 ? 0 : uint64_t{1} << (bits - 1);
            const uint64_t* above = std::upper_bound(thresholds_, thresholds_ + count_ - 1, smallest);
            start_[bits] = static_cast<int32_t>(above - thresholds_);
        }
        start_[65] = count_ - 1;
        inverse_unit_ = static_cast<float>(1 / unit);
        per_octave_ = static_cast<float>(0.6931471805599453 / divisor);
        margin_ = 4e-5f * per_octave_ + 4e-7f * static_cast<float>(count);
        guess_helps_ = margin_ < 0.1f && unit > 1e-12 && unit < 1e12;
    }

    int32_t count() const { return count_; }

    int32_t exact(uint64_t gap) const {
        const int bits = gap == 0 ? 0 : 64 - __builtin_clzll(gap);
        const uint64_t* first = thresholds_ + start_[bits];
        const uint64_t* last = thresholds_ + start_[bits + 1];
        if (last - first > 8) return static_cast<int32_t>(std::upper_bound(first, last, gap) - thresholds_);
        while (first < last && *first <= gap) first++;
        return static_cast<int32_t>(first - thresholds_);
    }

    // Buckets of `count` gaps; `ids` has room for whole vectors. With `small`, all times are within 2^52 of `base`, and
    // `relative` holds the keys' as float64: then a float32 logarithm guesses, and what lies near a threshold is looked up.
    void row(
        int64_t query, const int64_t* keys, const double* relative, int64_t base, bool small, int64_t count, int32_t* ids
    ) const {
        if (!small || !guess_helps_) {
            for (int64_t j = 0; j < count; j++) ids[j] = exact(gap_of(query, keys[j]));
            return;
        }
        const double asked = static_cast<double>(query - base);
        alignas(64) float gaps[TILE], guesses[TILE];
        for (int64_t j = 0; j < count; j++) gaps[j] = static_cast<float>(__builtin_fabs(asked - relative[j]));
        for (int64_t j = count; j < round_up(count, LANES); j++) gaps[j] = 0;
        const Vector largest = broadcast(static_cast<float>(count_ - 1) + 0.5f);
        Lanes doubtful{};
        for (int64_t j = 0; j < count; j += LANES) {
            const Vector x = maximum(load(gaps + j) * inverse_unit_, broadcast(1.0f));
            const Vector guess = minimum(log2_roughly(x) * per_octave_, largest);
            // Truncation is floor here, and makes 0 of the least bit below 0.
            const Lanes bucket = __builtin_convertvector(guess - margin_, Lanes);
            doubtful |= bucket ^ __builtin_convertvector(guess + margin_, Lanes);
            std::memcpy(ids + j, &bucket, sizeof bucket);
            store(guesses + j, guess);
        }
        if (!any_lane(doubtful)) return;
        for (int64_t j = 0; j < count; j++)
            if (static_cast<int32_t>(guesses[j] - margin_) != static_cast<int32_t>(guesses[j] + margin_))
                ids[j] = exact(gap_of(query, keys[j]));
    }

  private:
    static bool any_lane(Lanes mask) {
        uint64_t words[sizeof(Lanes) / 8], found = 0;
        std::memcpy(words, &mask, sizeof words);
        for (uint64_t word : words) found |= word;
        return found != 0;
    }

    const uint64_t* thresholds_;
    int32_t count_;
    int32_t start_[66];  // bucket of the smallest gap of so many bits
    float inverse_unit_, per_octave_;
    float margin_;  // how far a guess may be off, in buckets
    bool guess_helps_;
};

// The times of one sequence, prepared for tiles of rows (queries) and columns (keys).
struct SequenceTimes {
    const int64_t *queries, *keys;
    int64_t* least;    // of the keys from the beginning of its tile up to each key
    int64_t* largest;  // likewise
    double* relative;  // keys - base
    int64_t base;
    bool small;  // all times are within 2^52 of base, so that float64 differences are exact

    static int64_t bytes(int64_t length) { return round_up(length, 8) * 3 * 8; }

    void prepare(const int64_t* query_times, const int64_t* key_times, int64_t length, void* scratch) {
        queries = query_times;
        keys = key_times;
        least = static_cast<int64_t*>(scratch);
        largest = least + round_up(length, 8);
        relative = reinterpret_cast<double*>(largest + round_up(length, 8));
        base = keys[0];
        small = true;
        constexpr uint64_t exact_span = uint64_t{1} << 52;
        for (int64_t j = 0; j < length; j++) {
            const bool first = j % TILE == 0;
            least[j] = first ? keys[j] : std::min(least[j - 1], keys[j]);
            largest[j] = first ? keys[j] : std::max(largest[j - 1], keys[j]);
            small = small && gap_of(keys[j], base) < exact_span && gap_of(queries[j], base) < exact_span;
        }
        for (int64_t j = 0; small && j < length; j++) relative[j] = static_cast<double>(keys[j] - base);
    }

    void buckets_of_row(const TimeBuckets& buckets, int64_t row, int64_t first, int64_t count, int32_t* ids) const {
        buckets.row(queries[row], keys + first, relative + first, base, small, count, ids);
    }

    // The bucket of all pairs (row, first..row or last), or -1 if they may differ.
    int32_t common_bucket(const TimeBuckets& buckets, int64_t row, int64_t last) const {
        const int64_t query = queries[row], low = least[std::min(row, last)], high = largest[std::min(row, last)];
        const uint64_t to_low = gap_of(query, low), to_high = gap_of(query, high);
        const bool between = low < query && query < high;
        const int32_t bucket = buckets.exact(std::max(to_low, to_high));
        return bucket == buckets.exact(between ? 0 : std::min(to_low, to_high)) ? bucket : -1;
    }
};

}  // namespace turbogr
