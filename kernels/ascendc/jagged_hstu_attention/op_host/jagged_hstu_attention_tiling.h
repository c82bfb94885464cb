// Tiling of jagged_hstu_attention, forward and backward: shared by host, kernels and tests. Pure C++17.
#pragma once

#include <cstdint>

#include "../../common/align.h"
#include "../../common/cube_shape.h"
#include "../../common/limbs.h"
#include "../../common/pair_tables.h"

namespace turbogr::ascend {

constexpr int64_t HSTU_MOST_WIDTH = 512;  // of a head
constexpr int64_t HSTU_MOST_ROW = 65535;  // of all heads: what the cube may skip from row to row
constexpr int64_t HSTU_OBJECTS = 5;       // Matmul objects of the backward kernel, the forward has fewer

// What a core calculates at a time: up to BLOCK_ROWS x TILE pairs per head.
constexpr int64_t TILE_PAIRS = BLOCK_ROWS * TILE;

struct HstuShapes {
    int64_t tokens, heads, qk_width, v_width, element_bytes;
    int64_t position_count;  // P, or 0: no table
    int64_t time_count;      // K, or 0: no table
    int64_t cores;           // vector cores that run the kernel
};

struct HstuOptions {
    double scale, alpha, time_unit, time_divisor;
};

struct HstuTiling {
    int32_t tokens, heads, qk_width, v_width;
    int32_t cores;
    int32_t strip_rows;  // rows of TILE pairs that the vector unit works on at a time
    int32_t position_count;
    float scale, alpha;
    Bucketing buckets;
    CubeShape pairs, sums;  // of K Q^T and the like, and of what is summed over pairs
};

// A core's part of the workspace, in bytes. Two slots, so that products of one tile overlap with the other's vector work.
struct HstuWorkspace {
    int64_t scores, score_slot;    // float32 [2, heads, TILE_PAIRS], forward; backward has gradients of the weights besides
    int64_t value_grads;           // backward: float32 like scores
    int64_t weights, weight_slot;  // [2, heads, TILE_PAIRS] of the inputs' dtype
    int64_t score_grads;           // backward: like weights
    int64_t sums, second_sums;     // float32 [heads, BLOCK_ROWS, v_width], backward: qk_width, and v_width besides
    int64_t distances, buckets;    // backward: sums for the tables' gradients
    int64_t bytes;                 // of all
};

// The next part, of so many bytes; where it begins.
TURBOGR_SHARED int64_t hstu_part(HstuWorkspace& w, int64_t bytes) {
    const int64_t begin = w.bytes;
    w.bytes += round_up(bytes, GLOBAL_BYTES);
    return begin;
}

TURBOGR_SHARED HstuWorkspace hstu_workspace(const HstuTiling& t, int64_t element_bytes, bool backward) {
    HstuWorkspace w{};
    const int64_t pairs = t.heads * TILE_PAIRS, rows = t.heads * BLOCK_ROWS;
    w.score_slot = pairs * 4;
    w.weight_slot = pairs * element_bytes;
    w.scores = hstu_part(w, 2 * w.score_slot);
    w.weights = hstu_part(w, 2 * w.weight_slot);
    if (!backward) {
        w.sums = hstu_part(w, rows * t.v_width * 4);
        return w;
    }
    w.value_grads = hstu_part(w, 2 * w.score_slot);
    w.score_grads = hstu_part(w, 2 * w.weight_slot);
    w.sums = hstu_part(w, rows * t.qk_width * 4);
    w.second_sums = hstu_part(w, rows * t.v_width * 4);
    w.distances = hstu_part(w, distance_sums(t.position_count) * 4);
    w.buckets = hstu_part(w, bucket_sums(t.buckets.count) * 4);
    return w;
}

inline int64_t hstu_workspace_bytes(const HstuTiling& t, int64_t element_bytes, bool backward) {
    return t.cores * hstu_workspace(t, element_bytes, backward).bytes;
}

// Bytes of local memory that the kernels ask for with strips of so many rows, with what Select takes.
inline int64_t hstu_local_bytes(const HstuShapes& s, int64_t strip_rows, bool backward) {
    const int64_t strip = strip_rows * TILE * 4, tile = TILE * TILE * 4;
    int64_t bytes = SCRATCH_STRIPS * strip;
    bytes += pair_tables_local(s.position_count, s.time_count);
    if (s.position_count + s.time_count > 0) bytes += tile;  // the bias
    if (!backward) return bytes + 2 * strip + 2 * strip_rows * TILE * s.element_bytes + SELECT_RESERVE;
    bytes += 2 * 2 * strip + 2 * 2 * strip_rows * TILE * s.element_bytes;
    bytes += table_sums_local(s.position_count, s.time_count, strip_rows);
    if (s.position_count + s.time_count > 0) bytes += tile;  // gradients summed over heads
    return bytes + SELECT_RESERVE;
}

// Fills the tiling of both kernels. Returns null, or what is wrong.
inline const char* hstu_tiling(HstuTiling& t, const HstuShapes& s, const HstuOptions& o) {
    if (s.heads < 1 || s.qk_width < 1 || s.v_width < 1 || s.cores < 1) return "heads, widths and cores must be positive";
    if (s.element_bytes != 2 && s.element_bytes != 4) return "q, k and v must be float32, float16 or bfloat16";
    if (s.tokens < 0 || s.tokens >= int64_t{1} << 31) return "there may be at most 2^31 - 1 tokens";
    if (s.qk_width > HSTU_MOST_WIDTH || s.v_width > HSTU_MOST_WIDTH) return "a head may have at most 512 columns";
    if (s.heads * larger(s.qk_width, s.v_width) > HSTU_MOST_ROW) return "a token may have at most 65535 columns, of all heads";
    if (s.position_count < 0 || s.position_count >= int64_t{1} << 31) return "the position table may have at most 2^31 - 1 entries";
    if (s.time_count > 0 && !bucketing_is_exact(o.time_unit, o.time_divisor))
        return "the device finds buckets exactly from a time_divisor of 0.00025 on, and with a time_unit between 1e-12 and 1e12";
    int64_t rows = 32;
    while (rows > 8 && hstu_local_bytes(s, rows, true) > LOCAL_BYTES) rows /= 2;
    if (s.time_count < 0 || hstu_local_bytes(s, rows, true) > LOCAL_BYTES) return "the time table does not fit into local memory";
    const int64_t width = larger(s.qk_width, s.v_width);
    t = HstuTiling{
        static_cast<int32_t>(s.tokens), static_cast<int32_t>(s.heads), static_cast<int32_t>(s.qk_width),
        static_cast<int32_t>(s.v_width), static_cast<int32_t>(s.cores), static_cast<int32_t>(rows),
        static_cast<int32_t>(s.position_count), static_cast<float>(o.scale), static_cast<float>(o.alpha),
        bucketing_of(s.time_count, o.time_unit, o.time_divisor),
        // A tile is TILE keys x BLOCK_ROWS queries or the other way round.
        cube_shape(BLOCK_ROWS, BLOCK_ROWS, width, s.element_bytes), cube_shape(BLOCK_ROWS, width, BLOCK_ROWS, s.element_bytes)};
    return nullptr;
}

}  // namespace turbogr::ascend
