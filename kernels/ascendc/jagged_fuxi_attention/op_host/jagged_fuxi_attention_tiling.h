// Tiling of jagged_fuxi_attention, forward and backward: shared by host, kernels and tests. Pure C++17.
#pragma once

#include <cstdint>

#include "../../common/align.h"
#include "../../common/cube_shape.h"
#include "../../common/limbs.h"
#include "../../common/pair_tables.h"

namespace turbogr::ascend {

constexpr int64_t FUXI_MOST_WIDTH = 512;  // of a head
constexpr int64_t FUXI_MOST_ROW = 65535;  // of all heads: what the cube may skip from row to row
constexpr int64_t FUXI_OBJECTS = 5;       // Matmul objects of the backward kernel; the forward has fewer
constexpr int64_t FUXI_CHANNELS = 3;      // position, time, semantic: their order in the output
constexpr int64_t FUXI_SHARED = 2;        // of them, those whose weights all heads share

// What a core calculates at a time: up to BLOCK_ROWS x TILE pairs.
constexpr int64_t FUXI_TILE_PAIRS = BLOCK_ROWS * TILE;

constexpr int64_t FUXI_SPLIT_BYTES = 4 * 1024;  // of a buffer on the way of the incoming gradient to its channels
constexpr int64_t FUXI_WORK_STRIPS = 2;         // strips besides SCRATCH_STRIPS: a result, and offsets or gaps

// Gradient of the time function: three sums over pairs, TILE partial sums each.
constexpr int64_t FUNCTION_NUMBERS = 3;
constexpr int64_t FUNCTION_SUMS = FUNCTION_NUMBERS * TILE;

enum FuxiTime : int32_t { NO_TIME = 0, TIME_TABLE = 1, TIME_FUNCTION = 2 };

struct FuxiShapes {
    int64_t tokens, heads, qk_width, v_width, element_bytes;
    int64_t position_count;  // P, or 0: no position channel
    int64_t time_kind;       // a FuxiTime
    int64_t time_count;      // K of a table, else 0
    int64_t cores;           // vector cores that run the kernel
};

struct FuxiOptions {
    double scale, alpha, time_unit, time_divisor;
};

struct FuxiTiling {
    int32_t tokens, heads, qk_width, v_width;
    int32_t cores;
    int32_t strip_rows;  // rows of TILE pairs that the vector unit works on at a time
    int32_t position_count, time_kind;
    float scale, alpha;
    Bucketing buckets;      // of a time table; of a time function only inverse_unit is used
    CubeShape pairs, sums;  // of K Q^T and the like, and of what is summed over pairs

    TURBOGR_SHARED bool has_position() const { return position_count > 0; }
    TURBOGR_SHARED bool has_time() const { return time_kind != NO_TIME; }
};

// A core's part of the workspace, in bytes. Scores of heads have two slots, so that products of one head overlap with the
// vector work of another.
struct FuxiWorkspace {
    int64_t scores, value_grads;    // float32 [2, FUXI_TILE_PAIRS]; value_grads: backward
    int64_t weights, score_grads;   // [2, FUXI_TILE_PAIRS] of the inputs' dtype; score_grads: backward
    int64_t shared_weights;         // [FUXI_SHARED, FUXI_TILE_PAIRS] of the inputs' dtype
    int64_t shared_grads;           // backward: float32 [FUXI_SHARED, FUXI_TILE_PAIRS]
    int64_t sums;                   // float32 [FUXI_CHANNELS, BLOCK_ROWS, heads, v_width]; backward: [2, ...]
    int64_t second_sums;            // backward: float32 [BLOCK_ROWS, heads, qk_width]
    int64_t distances, times;       // backward: sums for the gradients of tables, or of the time function
    int64_t bytes;                  // of all
};

TURBOGR_SHARED int64_t fuxi_time_sums(const FuxiTiling& t) {
    return t.time_kind == TIME_TABLE ? bucket_sums(t.buckets.count) : t.time_kind == TIME_FUNCTION ? FUNCTION_SUMS : 0;
}

TURBOGR_SHARED void fuxi_take(FuxiWorkspace& w, int64_t& place, int64_t bytes) {
    place = w.bytes;
    w.bytes += round_up(bytes, GLOBAL_BYTES);
}

TURBOGR_SHARED FuxiWorkspace fuxi_workspace(const FuxiTiling& t, int64_t element_bytes, bool backward) {
    FuxiWorkspace w{};
    const int64_t rows = BLOCK_ROWS * t.heads;
    fuxi_take(w, w.scores, 2 * FUXI_TILE_PAIRS * 4);
    fuxi_take(w, w.weights, 2 * FUXI_TILE_PAIRS * element_bytes);
    fuxi_take(w, w.shared_weights, FUXI_SHARED * FUXI_TILE_PAIRS * element_bytes);
    fuxi_take(w, w.sums, (backward ? 2 : FUXI_CHANNELS) * rows * t.v_width * 4);
    if (!backward) return w;
    fuxi_take(w, w.value_grads, 2 * FUXI_TILE_PAIRS * 4);
    fuxi_take(w, w.score_grads, 2 * FUXI_TILE_PAIRS * element_bytes);
    fuxi_take(w, w.shared_grads, FUXI_SHARED * FUXI_TILE_PAIRS * 4);
    fuxi_take(w, w.second_sums, rows * t.qk_width * 4);
    fuxi_take(w, w.distances, distance_sums(t.position_count) * 4);
    fuxi_take(w, w.times, fuxi_time_sums(t) * 4);
    return w;
}

// Bytes of one of the incoming gradient's shared channels, [tokens, heads, v_width], behind the cores' parts (backward).
TURBOGR_SHARED int64_t fuxi_channel_bytes(const FuxiTiling& t, int64_t element_bytes) {
    return round_up(int64_t{t.tokens} * t.heads * t.v_width * element_bytes, GLOBAL_BYTES);
}

inline int64_t fuxi_workspace_bytes(const FuxiTiling& t, int64_t element_bytes, bool backward) {
    const bool split = backward && (t.has_position() || t.has_time());
    return t.cores * fuxi_workspace(t, element_bytes, backward).bytes +
           (split ? FUXI_SHARED * fuxi_channel_bytes(t, element_bytes) : 0);
}

// Bytes of local memory that the backward kernel asks for with strips of so many rows, with what Select takes; the forward
// kernel asks for less.
inline int64_t fuxi_local_bytes(const FuxiShapes& s, int64_t strip_rows) {
    const int64_t strip = strip_rows * TILE * 4;
    int64_t bytes = (SCRATCH_STRIPS + FUXI_WORK_STRIPS) * strip + 2 * 2 * strip + 2 * 2 * strip_rows * TILE * s.element_bytes;
    bytes += 2 * FUXI_SPLIT_BYTES + pair_tables_local(s.position_count, s.time_count);
    // The sums by distance and a tile of gradients; the sums by bucket, their range, and a mask.
    if (s.position_count > 0) bytes += 2 * PIECES_BYTES + TILE * TILE * 4;
    if (s.time_kind == TIME_TABLE) {
        bytes += bucket_sums(s.time_count) * 4 + 2 * COPY_BYTES + round_up(strip_rows * TILE / 8, COPY_BYTES);
    }
    if (s.time_kind == TIME_FUNCTION) bytes += TIME_WORDS_BYTES + TIME_LIMBS_BYTES + FUNCTION_SUMS * 4 + 2 * COPY_BYTES;
    return bytes + SELECT_RESERVE;
}

// Fills the tiling of both kernels. Returns null, or what is wrong.
inline const char* fuxi_tiling(FuxiTiling& t, const FuxiShapes& s, const FuxiOptions& o) {
    if (s.heads < 1 || s.qk_width < 1 || s.v_width < 1 || s.cores < 1) return "heads, widths and cores must be positive";
    if (s.element_bytes != 2 && s.element_bytes != 4) return "q, k and v must be float32, float16 or bfloat16";
    if (s.tokens < 0 || s.tokens >= int64_t{1} << 31) return "there may be at most 2^31 - 1 tokens";
    if (s.qk_width > FUXI_MOST_WIDTH || s.v_width > FUXI_MOST_WIDTH) return "a head may have at most 512 columns";
    if (s.heads * larger(s.qk_width, FUXI_CHANNELS * s.v_width) > FUXI_MOST_ROW)
        return "a token may have at most 65535 columns, of all heads and in the output of all channels";
    if (s.position_count < 0 || s.position_count >= int64_t{1} << 31)
        return "the position table may have at most 2^31 - 1 entries";
    if (s.time_kind < NO_TIME || s.time_kind > TIME_FUNCTION) return "the time channel is a table, a function or nothing";
    if ((s.time_kind == TIME_TABLE) != (s.time_count > 0)) return "a time table has entries, and nothing else has";
    if (s.time_kind == TIME_TABLE && !bucketing_is_exact(o.time_unit, o.time_divisor))
        return "buckets are exact from a time_divisor of 0.00025 on, and with a time_unit between 1e-12 and 1e12";
    if (s.time_kind == TIME_FUNCTION && !(o.time_unit > 1e-12 && o.time_unit < 1e12))
        return "time_unit must lie between 1e-12 and 1e12";
    int64_t rows = 32;
    while (rows > 8 && fuxi_local_bytes(s, rows) > LOCAL_BYTES) rows /= 2;
    if (fuxi_local_bytes(s, rows) > LOCAL_BYTES) return "the time table does not fit into local memory";
    Bucketing buckets = bucketing_of(s.time_count, o.time_unit, o.time_divisor);
    buckets.inverse_unit = static_cast<float>(1 / o.time_unit);
    const int64_t all_values = s.heads * s.v_width;
    t = FuxiTiling{
        static_cast<int32_t>(s.tokens), static_cast<int32_t>(s.heads), static_cast<int32_t>(s.qk_width),
        static_cast<int32_t>(s.v_width), static_cast<int32_t>(s.cores), static_cast<int32_t>(rows),
        static_cast<int32_t>(s.position_count), static_cast<int32_t>(s.time_kind), static_cast<float>(o.scale),
        static_cast<float>(o.alpha), buckets,
        // A tile is TILE keys x BLOCK_ROWS queries or the other way round; weights that heads share meet the values of all
        // heads.
        cube_shape(BLOCK_ROWS, BLOCK_ROWS, larger(s.qk_width, all_values), s.element_bytes),
        cube_shape(BLOCK_ROWS, larger(s.qk_width, all_values), TILE, s.element_bytes)};
    return nullptr;
}

}  // namespace turbogr::ascend
