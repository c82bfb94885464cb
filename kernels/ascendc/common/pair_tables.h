// Sizes of what kernels keep of a position and a time table: shared with the host, which must know what fits.
#pragma once

#include <cstdint>

#include "align.h"
#include "limbs.h"

namespace turbogr::ascend {

// Rows of square tiles and the sums of their gradients (position_rows.h).
constexpr int64_t COPIES = 8;                 // entries between aligned addresses
constexpr int64_t LAST_GROUP = TILE - COPIES; // first row of the last COPIES ones
constexpr int64_t PIECE = LAST_GROUP + TILE;  // entries of a copy in use
constexpr int64_t PIECE_STRIDE = round_up(PIECE, 64);
constexpr int64_t PIECES_BYTES = COPIES * PIECE_STRIDE * 4;

// A core's own sums by distance have room before and behind for what a tile has on the wrong side of the diagonal and behind a
// sequence, which is 0.
constexpr int64_t BEFORE_DISTANCES = TILE;

TURBOGR_SHARED constexpr int64_t distance_sums(int64_t count) {
    return count == 0 ? 0 : BEFORE_DISTANCES + round_up(count, TILE) + TILE;
}

// Times of a tile and the sums by bucket (time_pairs.h).
constexpr int64_t SCRATCH_STRIPS = 6;  // strips of float32 that TimePairs and BucketSums calculate in
constexpr int64_t TIME_WORDS_BYTES = 2 * 2 * TILE * 4, TIME_LIMBS_BYTES = 9 * TILE * 4;
constexpr int64_t PARTIAL_SUMS = 8;  // of each bucket

TURBOGR_SHARED constexpr int64_t bucket_sums(int64_t count) { return count * PARTIAL_SUMS; }

// Local bytes of PairBias, without its tile and scratch.
constexpr int64_t pair_tables_local(int64_t position_count, int64_t time_count) {
    int64_t bytes = position_count > 0 ? PIECES_BYTES : 0;
    if (time_count > 0) bytes += TIME_WORDS_BYTES + TIME_LIMBS_BYTES + (LIMBS + 1) * edge_stride(time_count) * 4;
    return bytes;
}

// Local bytes of the gradients' sums: DistanceSums, BucketSums, the buckets of a tile, a mask.
constexpr int64_t table_sums_local(int64_t position_count, int64_t time_count, int64_t strip_rows) {
    int64_t bytes = position_count > 0 ? 2 * PIECES_BYTES : 0;
    if (time_count > 0) {
        bytes += bucket_sums(time_count) * 4 + 2 * COPY_BYTES + TILE * TILE * 4 + round_up(strip_rows * TILE / 8, COPY_BYTES);
    }
    return bytes;
}

}  // namespace turbogr::ascend
