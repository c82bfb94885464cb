// Tiles of 64 x 64 scores: their bias and the products that they take part in.
#pragma once

#include "hstu_attention.h"
#include "matmul.h"
#include "tasks.h"
#include "time_buckets.h"
#include "vectors.h"

namespace turbogr {

// What all tasks share: the position table from the longest distance down to 0, so that a row of a tile reads it forwards, and
// the buckets. Behind distance 0 stand zeros for what a vector reads above the diagonal.
struct Shared {
    const TurbogrHstu& p;
    Queue queue;
    Memory memory;
    const float* reversed = nullptr;
    TimeBuckets buckets;

    explicit Shared(const TurbogrHstu& problem)
        : p(problem),
          buckets(problem.thresholds, buckets_of(problem), problem.time_unit, problem.time_divisor) {}

    static int64_t buckets_of(const TurbogrHstu& problem) { return problem.time_bias == nullptr ? 1 : problem.time_count; }

    bool build() {
        if (!queue.build(p.offsets, p.sequences, p.heads)) return false;
        memory = allocate((queue.longest + TILE) * static_cast<int64_t>(sizeof(float)));
        if (!memory) return false;
        float* table = reinterpret_cast<float*>(memory.get());
        for (int64_t x = 0; x < queue.longest; x++)
            table[x] = p.position_bias == nullptr ? 0 : p.position_bias[queue.longest - 1 - x];
        std::fill_n(table + queue.longest, TILE, 0.0f);
        reversed = table;
        return true;
    }
};

struct Tile {
    int64_t first_row, rows, first_column, columns;
    bool diagonal() const { return first_row == first_column; }
    // How many columns of this row (counted within the tile) lie on or below the diagonal.
    int64_t limit(int64_t row) const { return std::min(columns, first_row + row - first_column + 1); }
};

// The bias of one tile.
class Bias {
  public:
    Bias(const Shared& shared, Arena& arena, int64_t longest) : shared_(shared) {
        if (shared.p.time_bias == nullptr) return;
        times_memory_ = arena.take<char>(SequenceTimes::bytes(longest));
        values_ = arena.take<float>(TILE * TILE);
        ids_ = arena.take<int32_t>(TILE * TILE);
    }

    void sequence(const Task& task) {
        if (shared_.p.time_bias == nullptr) return;
        const int64_t token = task.first_token;
        times_.prepare(shared_.p.query_times + token, shared_.p.key_times + token, task.length, times_memory_);
    }

    void prepare(const Tile& tile) {
        tile_ = tile;
        const float* table = shared_.p.time_bias;
        if (table == nullptr) return;
        const int64_t last = tile.first_column + tile.columns - 1;
        for (int64_t i = 0; i < tile.rows; i++) {
            const int64_t limit = tile.limit(i);
            const float* position = positions(i);
            float* values = values_ + i * TILE;
            common_[i] = times_.common_bucket(shared_.buckets, tile.first_row + i, last);
            if (common_[i] >= 0) {
                for (int64_t j = 0; j < limit; j += LANES) store(values + j, load(position + j) + table[common_[i]]);
            } else {
                int32_t* ids = ids_ + i * TILE;
                times_.buckets_of_row(shared_.buckets, tile.first_row + i, tile.first_column, limit, ids);
                for (int64_t j = 0; j < limit; j++) values[j] = table[ids[j]];
                for (int64_t j = limit; j % LANES != 0; j++) values[j] = 0;
                for (int64_t j = 0; j < limit; j += LANES) store(values + j, load(values + j) + load(position + j));
            }
        }
    }

    // Up to the row's limit, rounded up to whole vectors.
    const float* row(int64_t i) const { return shared_.p.time_bias == nullptr ? positions(i) : values_ + i * TILE; }

    // One bucket of the whole row, or -1: then ids() has each element's.
    int32_t common(int64_t i) const { return common_[i]; }
    const int32_t* ids(int64_t i) const { return ids_ + i * TILE; }

  private:
    const float* positions(int64_t i) const {
        return shared_.reversed + (shared_.queue.longest - 1 - tile_.first_row - i) + tile_.first_column;
    }

    const Shared& shared_;
    SequenceTimes times_{};
    Tile tile_{};
    void* times_memory_ = nullptr;
    float* values_ = nullptr;
    int32_t* ids_ = nullptr;
    int32_t common_[TILE];
};

// Widths and row counts in whole vectors.
static inline int64_t padded(int64_t width) { return round_up(width, LANES); }

// Rows [length, width] of one head (zeros behind them up to a whole vector of rows), transposed tile by tile: tile t is
// [width, 64] at t * 64 * padded(width).
static inline void pack_transposed(const float* rows, int64_t length, int64_t width, float* to) {
    for (int64_t j = 0; j < length; j += TILE) {
        const int64_t columns = padded(std::min<int64_t>(TILE, length - j));
        transpose(rows + j * padded(width), padded(width), columns, padded(width), to + j * padded(width), TILE);
    }
}

// A tensor [T, heads, width] of the caller's.
template <typename Float>
struct Heads {
    Float* data;
    int64_t row, head, width;

    Float* at(int64_t token, int64_t h) const { return data + token * row + h * head; }
};

// Rows of one head of a task, times a factor, padded to `rows` rows.
static inline void pack_head(const Heads<const float>& x, const Task& task, int64_t h, float factor, float* to, int64_t rows) {
    pack(x.at(task.first_token, task.first_head + h), x.row, task.length, x.width, factor, to, padded(x.width), rows);
}

// The reverse for `rows` rows from row `first` of the task's sequence on.
static inline void unpack_head(
    const float* from, float factor, const Heads<float>& x, const Task& task, int64_t h, int64_t first, int64_t rows
) {
    unpack(from, padded(x.width), rows, x.width, factor, x.at(task.first_token + first, task.first_head + h), x.row);
}

static inline void scores(const Tile& tile, int64_t width, const float* rows, const float* transposed, float* to) {
    const int vectors = static_cast<int>(padded(tile.columns) / LANES);
    const Strided a{rows + tile.first_row * padded(width), padded(width), 1};
    const float* b = transposed + tile.first_column * padded(width);
    if (tile.diagonal()) product<Skip::columns_after_row>(tile.rows, vectors, width, a, b, TILE, to, TILE, false);
    else product<Skip::nothing>(tile.rows, vectors, width, a, b, TILE, to, TILE, false);
}

// to [rows of the tile, width] (+)= tile [64, 64] times the rows of its columns.
static inline void times_columns(const Tile& tile, int64_t width, const float* values, const float* rows, float* to, bool add) {
    const int vectors = static_cast<int>(padded(width) / LANES);
    const Strided a{values, TILE, 1};
    const float* b = rows + tile.first_column * padded(width);
    const int64_t stride = padded(width);
    if (tile.diagonal()) product<Skip::inner_after_row>(tile.rows, vectors, tile.columns, a, b, stride, to, stride, add);
    else product<Skip::nothing>(tile.rows, vectors, tile.columns, a, b, stride, to, stride, add);
}

// to [columns of the tile, width] (+)= transposed tile times the rows of its rows.
static inline void times_rows(const Tile& tile, int64_t width, const float* values, const float* rows, float* to, bool add) {
    const int vectors = static_cast<int>(padded(width) / LANES);
    const Strided a{values, 1, TILE};
    const float* b = rows + tile.first_row * padded(width);
    const int64_t stride = padded(width);
    if (tile.diagonal()) product<Skip::inner_before_row>(tile.columns, vectors, tile.rows, a, b, stride, to, stride, add);
    else product<Skip::nothing>(tile.columns, vectors, tile.rows, a, b, stride, to, stride, add);
}

}  // namespace turbogr
