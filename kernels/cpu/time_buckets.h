// Buckets of time differences: exactly those of the float64 formula, which the caller has turned into integer thresholds.
#pragma once

#include <algorithm>

#include "tasks.h"
#include "tiles.h"
#include "vectors.h"

namespace turbogr {

// |a - b| as an unsigned number, for any two int64.
static inline uint64_t gap_of(int64_t a, int64_t b) {
    const uint64_t x = static_cast<uint64_t>(a), y = static_cast<uint64_t>(b);
    return a < b ? y - x : x - y;
}

// Times, and as float64 their differences from a common time; readable up to a whole vector.
struct Times {
    const int64_t* exact;
    const double* relative;
    Times from(int64_t index) const { return {exact + index, relative + index}; }
};

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

    // Of a bucket from 1 on that some gap reaches.
    int64_t smallest_gap(int32_t bucket) const { return static_cast<int64_t>(thresholds_[bucket - 1]); }

    // Buckets of the gaps between `count` times and one other, or with MANY as many others; `ids` has room for whole vectors.
    template <bool MANY>
    void find(const Times& times, const Times& others, bool exact_differences, int64_t count, int32_t* ids) const {
        const auto look_up = [&](int64_t j) { ids[j] = exact(gap_of(times.exact[j], others.exact[MANY ? j : 0])); };
        if (!exact_differences || !guess_helps_) {
            for (int64_t j = 0; j < count; j++) look_up(j);
            return;
        }
        for (int64_t j = 0; j < count; j += LANES) {
            const Lanes doubt = guess(distances<MANY>(times.relative + j, others.relative + (MANY ? j : 0)), ids + j);
            if (__builtin_expect(any(doubt), false))
                for (int64_t x = j; x < std::min(j + LANES, count); x++) look_up(x);
        }
    }

  private:
    // Writes what are the buckets, but for the lanes where something is returned.
    Lanes guess(Vector gaps, int32_t* ids) const {
        const Vector largest = broadcast(static_cast<float>(count_ - 1) + 0.5f);
        const Vector x = maximum(gaps * inverse_unit_, broadcast(1.0f));
        const Vector guess = minimum(log2_roughly(x) * per_octave_, largest);
        // Truncation is floor here, and makes 0 of the least bit below 0.
        const Lanes bucket = __builtin_convertvector(guess - margin_, Lanes);
        store(ids, bucket);
        return bucket ^ __builtin_convertvector(guess + margin_, Lanes);
    }

    const uint64_t* thresholds_;
    int32_t count_;
    int32_t start_[66];  // bucket of the smallest gap of so many bits
    float inverse_unit_, per_octave_;
    float margin_;  // how far a guess may be off, in buckets
    bool guess_helps_;
};

// The buckets of a row's elements lie between these.
struct BucketRange {
    int32_t low, high;
};

// The times of one sequence, prepared for tiles of rows (queries) and columns (keys).
struct SequenceTimes {
    Times queries, keys;     // relative to the first key
    bool exact_differences;  // all are within 2^52 of it, so that differences of the relative times are exact
    bool ordered;            // keys rise, and no query is before its own key

    static int64_t bytes(int64_t length) { return 2 * (length + LANES) * static_cast<int64_t>(sizeof(double)); }

    void prepare(const int64_t* query_times, const int64_t* key_times, int64_t length, void* scratch) {
        double *from_queries = static_cast<double*>(scratch), *from_keys = from_queries + length + LANES;
        const int64_t base = key_times[0];
        queries = {query_times, from_queries};
        keys = {key_times, from_keys};
        exact_differences = ordered = true;
        constexpr uint64_t span = uint64_t{1} << 52;
        for (int64_t j = 0; j < length; j++) {
            const int64_t query = query_times[j], key = key_times[j];
            ordered = ordered && key <= query && (j == 0 || key_times[j - 1] <= key);
            exact_differences = exact_differences && gap_of(key, base) < span && gap_of(query, base) < span;
            from_queries[j] = exact_differences ? static_cast<double>(query - base) : 0;
            from_keys[j] = exact_differences ? static_cast<double>(key - base) : 0;
        }
        std::fill_n(from_queries + length, LANES, 0.0);
        std::fill_n(from_keys + length, LANES, 0.0);
    }

    // Of a row that has the given range.
    void buckets_of_row(
        const TimeBuckets& buckets, int64_t row, int64_t first, int64_t count, BucketRange range, int32_t* ids
    ) const {
        constexpr int32_t FEW = 4;
        if (ordered && exact_differences && range.high - range.low <= FEW) {
            // The later the key, the lower the bucket.
            const double* from = keys.relative + first;
            for (int64_t j = 0; j < count; j += LANES) store(ids + j, Lanes{} + range.low);
            for (int32_t bucket = range.low + 1; bucket <= range.high; bucket++) {
                const double latest = queries.relative[row] - static_cast<double>(buckets.smallest_gap(bucket));
                for (int64_t j = 0; j < count; j += LANES) store(ids + j, load(ids + j) - at_most(from + j, latest));
            }
            return;
        }
        buckets.find<false>(keys.from(first), queries.from(row), exact_differences, count, ids);
    }

    // The range of each row of a tile. Unordered times have the widest ones.
    void prepare_ranges(const TimeBuckets& buckets, const Tile& tile, BucketRange* ranges) const {
        if (!ordered) {
            std::fill_n(ranges, tile.rows, BucketRange{0, buckets.count() - 1});
            return;
        }
        int32_t high[TILE], low[TILE];  // buckets of each row's first and last element
        const Times rows = queries.from(tile.first_row);
        buckets.find<false>(rows, keys.from(tile.first_column), exact_differences, tile.rows, high);
        if (tile.diagonal()) buckets.find<true>(rows, keys.from(tile.first_row), exact_differences, tile.rows, low);
        else buckets.find<false>(rows, keys.from(tile.first_column + tile.columns - 1), exact_differences, tile.rows, low);
        for (int64_t i = 0; i < tile.rows; i++) ranges[i] = {low[i], high[i]};
    }
};

}  // namespace turbogr
