// The bias of scores from a table by distance and one by time difference, tile by tile, and the tables' gradients.
#pragma once

#include "bias_tables.h"
#include "tasks.h"
#include "tiles.h"
#include "time_buckets.h"
#include "vectors.h"

namespace turbogr {

// What all tasks share: the position table from the longest distance down to 0, so that a row of a tile reads it forwards, and
// the buckets. Behind distance 0 stand zeros for what a vector reads above the diagonal.
struct BiasTables {
    const TurbogrBias& inputs;
    TimeBuckets buckets;
    Memory memory;
    const float* reversed = nullptr;
    int64_t longest = 0;

    explicit BiasTables(const TurbogrBias& bias)
        : inputs(bias),
          buckets(bias.thresholds, bias.time_bias == nullptr ? 1 : bias.time_count, bias.time_unit, bias.time_divisor) {}

    bool position() const { return inputs.position_bias != nullptr; }
    bool time() const { return inputs.time_bias != nullptr; }

    // False if there is no memory. A missing position table is one of zeros.
    bool build(int64_t longest_sequence) {
        longest = longest_sequence;
        memory = allocate((longest + TILE) * static_cast<int64_t>(sizeof(float)));
        if (!memory) return false;
        float* table = reinterpret_cast<float*>(memory.get());
        for (int64_t x = 0; x < longest; x++) table[x] = position() ? inputs.position_bias[longest - 1 - x] : 0;
        std::fill_n(table + longest, TILE, 0.0f);
        reversed = table;
        return true;
    }
};

// The bias of one tile after another.
class TileBias {
  public:
    // With `apart`, row() is the time bias alone, else the sum of both.
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
        const float* table = tables_.inputs.time_bias;
        const int64_t last = tile.first_column + tile.columns - 1;
        for (int64_t i = 0; i < tile.rows; i++) {
            const int64_t limit = tile.limit(i);
            float* values = values_ + i * TILE;
            common_[i] = times_.common_bucket(tables_.buckets, tile.first_row + i, last);
            if (common_[i] >= 0) {
                for (int64_t j = 0; j < limit; j += LANES) store(values + j, broadcast(table[common_[i]]));
            } else {
                int32_t* ids = ids_ + i * TILE;
                times_.buckets_of_row(tables_.buckets, tile.first_row + i, tile.first_column, limit, ids);
                for (int64_t j = 0; j < limit; j++) values[j] = table[ids[j]];
                for (int64_t j = limit; j % LANES != 0; j++) values[j] = 0;
            }
            if (apart_ || !tables_.position()) continue;
            const float* position = positions(i);
            for (int64_t j = 0; j < limit; j += LANES) store(values + j, load(values + j) + load(position + j));
        }
    }

    // Up to the row's limit, rounded up to whole vectors; with `apart` only if there is a time table.
    const float* row(int64_t i) const { return tables_.time() ? values_ + i * TILE : positions(i); }

    // The position bias alone, likewise.
    const float* positions(int64_t i) const {
        return tables_.reversed + (tables_.longest - 1 - tile_.first_row - i) + tile_.first_column;
    }

    // One bucket of the whole row, or -1: then ids() has each element's. Only if there is a time table.
    int32_t common(int64_t i) const { return common_[i]; }
    const int32_t* ids(int64_t i) const { return ids_ + i * TILE; }

  private:
    const BiasTables& tables_;
    const bool apart_;
    SequenceTimes times_{};
    Tile tile_{};
    void* times_memory_ = nullptr;
    float* values_ = nullptr;
    int32_t* ids_ = nullptr;
    int32_t common_[TILE];
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
            first_[t + 1] = first_[t] + (tables_.position() ? round_up(queue_.tasks[t].length + LANES, 16) : 0);
        distances_ = allocate(first_[queue_.count] * static_cast<int64_t>(sizeof(float)));
        buckets_ = allocate(queue_.count * buckets * static_cast<int64_t>(sizeof(double)));
        return distances_ && buckets_;
    }

    // Of one task: by distance, the longest first (room for a vector behind distance 0), and by bucket.
    float* distances(int64_t task) const { return reinterpret_cast<float*>(distances_.get()) + first_[task]; }
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
    TaskBiasGradients(const BiasTables& tables, const TileBias& bias, Arena& arena)
        : tables_(tables), bias_(bias), stride_(tables.time() ? round_up(tables.inputs.time_count, 16) : 0) {
        sums_ = arena.take<float>(COPIES * stride_);
    }

    void begin(const Task& task, const BiasGradients& gradients, int64_t index) {
        distances_ = gradients.distances(index);
        buckets_ = gradients.buckets(index);
        last_ = task.length - 1;
        if (tables_.position()) std::fill_n(distances_, task.length + LANES, 0.0f);
        if (!tables_.time()) return;
        std::fill_n(buckets_, tables_.inputs.time_count, 0.0);
        std::fill_n(sums_, COPIES * stride_, 0.0f);
    }

    // Only with a position table.
    void add_positions(const Tile& tile, const float* gradients) {
        for (int64_t i = 0; i < tile.rows; i++) {
            float* to = distances_ + last_ - (tile.first_row + i) + tile.first_column;
            for (int64_t j = 0; j < tile.limit(i); j += LANES) store(to + j, load(to + j) + load(gradients + i * TILE + j));
        }
    }

    // Only with a time table, of the tile that the bias was prepared for last.
    void add_buckets(const Tile& tile, const float* gradients) {
        // Rows of one bucket follow each other: their lanes are added up first.
        Vector lanes{};
        int32_t bucket = -1;
        for (int64_t i = 0; i < tile.rows; i++) {
            const int64_t limit = tile.limit(i);
            const float* row = gradients + i * TILE;
            const int32_t common = bias_.common(i);
            if (common < 0) {
                const int32_t* ids = bias_.ids(i);
                for (int64_t j = 0; j < limit; j++) sums_[(j % COPIES) * stride_ + ids[j]] += row[j];
                continue;
            }
            if (common != bucket) {
                if (bucket >= 0) sums_[bucket] += sum(lanes);
                lanes = Vector{};
                bucket = common;
            }
            for (int64_t j = 0; j < limit; j += LANES) lanes += load(row + j);
        }
        if (bucket >= 0) sums_[bucket] += sum(lanes);
    }

    // After every column of tiles: hands the float32 sums over to float64.
    void flush() {
        if (!tables_.time()) return;
        for (int64_t b = 0; b < tables_.inputs.time_count; b++)
            for (int64_t copy = 0; copy < COPIES; copy++) buckets_[b] += sums_[copy * stride_ + b];
        std::fill_n(sums_, COPIES * stride_, 0.0f);
    }

  private:
    static constexpr int64_t COPIES = 4;  // neighbouring elements add into different copies, so that no add waits for the last

    const BiasTables& tables_;
    const TileBias& bias_;
    int64_t stride_, last_ = 0;
    float *sums_, *distances_ = nullptr;
    double* buckets_ = nullptr;
};

}  // namespace turbogr
