// The bias of scores from a table by distance and one by time difference, tile by tile, and the tables' gradients.
#pragma once

#include "bias_tables.h"
#include "tasks.h"
#include "tiles.h"
#include "time_buckets.h"
#include "vectors.h"

namespace turbogr {

// What all tasks share: the position table from the longest distance down to 0, so that a row of a tile reads it forwards, the
// time table, and the buckets. Behind both tables stand zeros for what vectors read beyond them.
struct BiasTables {
    const TurbogrBias& inputs;
    TimeBuckets buckets;
    Memory memory;
    const float *reversed = nullptr, *times = nullptr;
    int64_t longest = 0;

    explicit BiasTables(const TurbogrBias& bias)
        : inputs(bias),
          buckets(bias.thresholds, bias.time_bias == nullptr ? 1 : bias.time_count, bias.time_unit, bias.time_divisor) {}

    bool position() const { return inputs.position_bias != nullptr; }
    bool time() const { return inputs.time_bias != nullptr; }

    // False if there is no memory. A missing position table is one of zeros.
    bool build(int64_t longest_sequence) {
        longest = longest_sequence;
        const int64_t count = time() ? inputs.time_count : 0;
        memory = allocate((longest + TILE + count + 2 * LANES) * static_cast<int64_t>(sizeof(float)));
        if (!memory) return false;
        float* table = reinterpret_cast<float*>(memory.get());
        reversed = table;
        for (int64_t x = 0; x < longest; x++) *table++ = position() ? inputs.position_bias[longest - 1 - x] : 0;
        table = std::fill_n(table, TILE, 0.0f);
        times = table;
        table = std::copy_n(inputs.time_bias, count, table);
        std::fill_n(table, 2 * LANES, 0.0f);
        return true;
    }
};

// The bias of a row of a tile: values, and a constant to be added to them.
struct BiasRow {
    const float* values;
    float constant;
};

// The bias of one tile after another.
class TileBias {
  public:
    // With `apart`, row() is the time bias and positions() the position bias, else sum() is the sum of both.
    TileBias(const BiasTables& tables, Arena& arena, bool apart = false) : tables_(tables), apart_(apart) {
        if (!tables.time()) return;
        times_memory_ = arena.take<char>(SequenceTimes::bytes(tables.longest));
        values_ = arena.take<float>(TILE * TILE);
        ids_ = arena.take<int32_t>(TILE * TILE);
    }

    void sequence(const Task& task) {
        if (!tables_.time()) return;
        const int64_t token = task.first_token;
        times_.prepare(tables_.inputs.query_times + token, tables_.inputs.key_times + token, task.length, times_memory_);
    }

    void prepare(const Tile& tile) {
        tile_ = tile;
        if (!tables_.time()) return;
        times_.prepare_ranges(tables_.buckets, tile, ranges_);
        for (int64_t i = 0; i < tile.rows; i++) {
            if (!one_bucket(i)) {
                times_.buckets_of_row(tables_.buckets, tile.first_row + i, tile.first_column, tile.limit(i), ranges_[i], ids_ + i * TILE);
                look_up(i);
            } else if (apart_) {
                fill(i, [&](int64_t) { return broadcast(tables_.times[ranges_[i].low]); });
            }
        }
    }

    // All of these up to the row's limit, rounded up to whole vectors.
    BiasRow sum(int64_t i) const {
        if (!tables_.time()) return {positions(i), 0};
        if (one_bucket(i)) return {positions(i), tables_.times[ranges_[i].low]};
        return {values_ + i * TILE, 0};
    }
    const float* row(int64_t i) const { return values_ + i * TILE; }
    const float* positions(int64_t i) const {
        return tables_.reversed + (tables_.longest - 1 - tile_.first_row - i) + tile_.first_column;
    }

    // Only if there is a time table: the range of a row's buckets, and if they differ, each element's.
    BucketRange range(int64_t i) const { return ranges_[i]; }
    const int32_t* ids(int64_t i) const { return ids_ + i * TILE; }

  private:
    bool one_bucket(int64_t i) const { return ranges_[i].low == ranges_[i].high; }

    void look_up(int64_t i) {
        const float* table = tables_.times;
        const int32_t* ids = ids_ + i * TILE;
        const auto [low, high] = ranges_[i];
        if (high - low < 2 * LANES) {
            const Vector first = load(table + low), second = load(table + low + LANES);
            fill(i, [&, low = low](int64_t j) { return choose(first, second, load(ids + j) - low); });
            return;
        }
        alignas(64) float times[TILE]{};
        for (int64_t j = 0; j < tile_.limit(i); j++) times[j] = table[ids[j]];
        fill(i, [&](int64_t j) { return load(times + j); });
    }

    template <typename Times>
    void fill(int64_t i, Times times) {
        float* to = values_ + i * TILE;
        const bool add = !apart_ && tables_.position();
        for (int64_t j = 0; j < tile_.limit(i); j += LANES) store(to + j, add ? load(positions(i) + j) + times(j) : times(j));
    }

    const BiasTables& tables_;
    const bool apart_;
    SequenceTimes times_{};
    Tile tile_{};
    void* times_memory_ = nullptr;
    float* values_ = nullptr;
    int32_t* ids_ = nullptr;
    BucketRange ranges_[TILE];
};

// Sums of score gradients by distance and by bucket: each task has its own, which are added up in the order of the batch, so
// that they do not depend on which thread ran what.
class BiasGradients {
  public:
    BiasGradients(const BiasTables& tables, const Queue& queue) : tables_(tables), queue_(queue) {}

    // False if there is no memory.
    bool build() {
        const int64_t buckets = tables_.time() ? tables_.inputs.time_count : 0;
        first_.reset(new (std::nothrow) int64_t[static_cast<size_t>(queue_.count + 1)]);
        if (!first_) return false;
        first_[0] = 0;
        for (int64_t t = 0; t < queue_.count; t++)
            first_[t + 1] = first_[t] + (tables_.position() ? round_up(queue_.tasks[t].length + 2 * LANES, 16) : 0);
        distances_ = allocate(first_[queue_.count] * static_cast<int64_t>(sizeof(float)));
        buckets_ = allocate(queue_.count * buckets * static_cast<int64_t>(sizeof(double)));
        return distances_ && buckets_;
    }

    // Of one task: by distance, the longest first (with room for a vector before and behind), and by bucket.
    float* distances(int64_t task) const { return reinterpret_cast<float*>(distances_.get()) + first_[task] + LANES; }
    double* buckets(int64_t task) const {
        return reinterpret_cast<double*>(buckets_.get()) + task * (tables_.time() ? tables_.inputs.time_count : 0);
    }

    // Writes the gradients whole: position [position_count] and time [time_count], each only if there is such a table.
    bool finish(float* position, int64_t position_count, float* time) const {
        const int64_t most = std::max(tables_.position() ? position_count : 0, tables_.time() ? tables_.inputs.time_count : 0);
        const Memory memory = allocate(most * static_cast<int64_t>(sizeof(double)));
        if (!memory) return false;
        double* totals = reinterpret_cast<double*>(memory.get());
        if (tables_.position()) {
            std::fill_n(totals, position_count, 0.0);
            for (int64_t t = 0; t < queue_.count; t++) {
                const int64_t length = queue_.tasks[t].length;
                for (int64_t d = 0; d < length; d++) totals[d] += distances(t)[length - 1 - d];
            }
            for (int64_t d = 0; d < position_count; d++) position[d] = static_cast<float>(totals[d]);
        }
        if (tables_.time()) {
            std::fill_n(totals, tables_.inputs.time_count, 0.0);
            for (int64_t t = 0; t < queue_.count; t++)
                for (int64_t b = 0; b < tables_.inputs.time_count; b++) totals[b] += buckets(t)[b];
            for (int64_t b = 0; b < tables_.inputs.time_count; b++) time[b] = static_cast<float>(totals[b]);
        }
        return true;
    }

  private:
    const BiasTables& tables_;
    const Queue& queue_;
    std::unique_ptr<int64_t[]> first_;
    Memory distances_, buckets_;
};

// Adds the score gradients of a task's tiles to its sums. A gradient tile is [rows, TILE], summed over heads, and zero between
// a row's limit and the end of that vector.
class TaskBiasGradients {
  public:
    TaskBiasGradients(const BiasTables& tables, const TileBias& bias, Arena& arena) : tables_(tables), bias_(bias) {
        sums_ = arena.take<float>(tables.time() ? tables.inputs.time_count * LANES : 0);
    }

    void begin(const Task& task, const BiasGradients& gradients, int64_t index) {
        distances_ = gradients.distances(index);
        buckets_ = gradients.buckets(index);
        last_ = task.length - 1;
        if (tables_.position()) std::fill_n(distances_ - LANES, task.length + 2 * LANES, 0.0f);
        if (!tables_.time()) return;
        std::fill_n(buckets_, tables_.inputs.time_count, 0.0);
        least_ = static_cast<int32_t>(tables_.inputs.time_count);
        most_ = -1;
    }

    // Only with a position table.
    void add_positions(const Tile& tile, const float* gradients) {
        float* to = distances_ + last_ - tile.first_row + tile.first_column;
        if (tile.diagonal()) {
            for (int64_t i = 0; i < tile.rows; i++)
                for (int64_t j = 0; j < tile.limit(i); j += LANES) add(to - i + j, load(gradients + i * TILE + j));
            return;
        }
        // A row's sums begin one element before those of the row above. Adding them in memory would wait at every row for the
        // last one's stores, so they lie in registers, and move by a lane from row to row, the last row first.
        constexpr int VECTORS = TILE / LANES;
        Vector sums[VECTORS + 2]{};  // first what has moved out, last zeros
        int64_t i = round_up(tile.rows, LANES);
        while (i > 0) {
            const float* row = gradients + --i * TILE;
            if (i < tile.rows) unrolled<VECTORS>([&](auto v) { sums[v + 1] += load(row + v * LANES); });
            unrolled<VECTORS + 1>([&](auto v) { sums[v] = move_down(sums[v], sums[v + 1]); });
            if (i % LANES == 0) add(to - i - (LANES - 1), sums[0]);
        }
        unrolled<VECTORS>([&](auto v) { add(to + 1 + v * LANES, sums[v + 1]); });
    }

    // Only with a time table, of the tile that the bias was prepared for last.
    void add_buckets(const Tile& tile, const float* gradients) {
        constexpr int32_t FEW = 4;
        for (int64_t i = 0; i < tile.rows; i++) {
            const int64_t limit = tile.limit(i);
            const float* row = gradients + i * TILE;
            const int32_t* ids = bias_.ids(i);
            const auto [low, high] = bias_.range(i);
            touch(low, high);
            if (low == high) {
                Vector total = load(row);
                for (int64_t j = LANES; j < limit; j += LANES) total += load(row + j);
                add(sums_ + low * LANES, total);
            } else if (high - low < FEW) {
                for (int32_t bucket = low; bucket <= high; bucket++) {
                    Vector total{};
                    for (int64_t j = 0; j < limit; j += LANES) total += load(ids + j) == bucket ? load(row + j) : Vector{};
                    add(sums_ + bucket * LANES, total);
                }
            } else {
                for (int64_t j = 0; j < limit; j++) sums_[ids[j] * LANES + j % LANES] += row[j];
            }
        }
    }

    // After every column of tiles: hands the float32 sums over to float64.
    void flush() {
        for (int32_t b = least_; b <= most_; b++) buckets_[b] += sum(load(sums_ + b * LANES));
        least_ = static_cast<int32_t>(tables_.inputs.time_count);
        most_ = -1;
    }

  private:
    static void add(float* to, Vector x) { store(to, load(to) + x); }

    // Sums of a bucket are zero before it is touched.
    void touch(int32_t least, int32_t most) {
        if (most_ < 0) least_ = least, most_ = least - 1;
        while (least_ > least) store(sums_ + --least_ * LANES, Vector{});
        while (most_ < most) store(sums_ + ++most_ * LANES, Vector{});
    }

    const BiasTables& tables_;
    const TileBias& bias_;
    int64_t last_ = 0;
    int32_t least_ = 0, most_ = -1;  // the buckets touched since the last flush
    float *sums_, *distances_ = nullptr;  // sums_: a vector of partial sums for each bucket
    double* buckets_ = nullptr;
};

}  // namespace turbogr
