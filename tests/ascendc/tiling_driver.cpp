// Tiling and core assignment as plain functions, for test_core_assignment.py, test_hstu_tiling.py and test_fuxi_tiling.py.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <vector>

#include "host/driver.h"

#include "common/bucket_edges.h"
#include "common/core_assignment.h"
#include "common/tile_walk.h"
#include "jagged_fuxi_attention/op_host/jagged_fuxi_attention_tiling.h"
#include "jagged_hstu_attention/op_host/jagged_hstu_attention_tiling.h"

using namespace turbogr::ascend;

namespace {

BlockOf kind_of(int64_t by_keys) { return by_keys != 0 ? BlockOf::KEYS : BlockOf::QUERIES; }

HstuShapes shapes_of(const int64_t* numbers) {
    HstuShapes s;
    static_assert(sizeof s == 8 * sizeof(int64_t));
    std::memcpy(&s, numbers, sizeof s);
    return s;
}

}  // namespace

extern "C" {

// pairs [cores]: of each core. Returns the pairs of the largest block.
int64_t core_pairs(int64_t by_keys, const int64_t* offsets, int64_t sequences, int64_t cores, int64_t* pairs) {
    const CoreAssignment assigned = assign_row_blocks(kind_of(by_keys), offsets, sequences, cores);
    std::copy(assigned.pairs.begin(), assigned.pairs.end(), pairs);
    int64_t most = 0;
    for (const auto& blocks : assigned.blocks)
        for (const RowBlock& x : blocks)
            most = std::max(
                most, causal_pairs(kind_of(by_keys), x.length, x.first, std::min<int64_t>(x.first + BLOCK_ROWS, x.length)));
    return most;
}

// The packed plan; returns its length, and writes at most `room` numbers.
int64_t packed_plan(int64_t by_keys, const int64_t* offsets, int64_t sequences, int64_t cores, int32_t* plan, int64_t room) {
    const std::vector<int32_t> packed = assign_row_blocks(kind_of(by_keys), offsets, sequences, cores).packed();
    std::copy_n(packed.begin(), std::min<int64_t>(room, static_cast<int64_t>(packed.size())), plan);
    return static_cast<int64_t>(packed.size());
}

// How often the tiles of all blocks of a sequence cover each pair, int32 [length, length] by query and key; and for each row of a
// block whether the first tile has it: returns how many have not.
int64_t covered_pairs(int64_t by_keys, int64_t length, int32_t* times) {
    int64_t missing = 0;
    for (int64_t first = 0; first < length; first += BLOCK_ROWS) {
        const TileWalk walk{{0, static_cast<int32_t>(length), static_cast<int32_t>(first)}, by_keys != 0};
        for (int64_t i = 0; i < walk.count(); i++) {
            const PairTile t = walk.tile(i);
            if (i == 0) missing += walk.rows() - (by_keys != 0 ? t.keys : t.queries);
            for (int64_t query = t.query; query < t.query + t.queries; query++)
                for (int64_t key = t.key; key < t.key + t.keys; key++) times[query * length + key]++;
        }
    }
    return missing;
}

void thresholds(int64_t count, double unit, double divisor, int64_t* to) {
    const std::vector<int64_t> smallest = bucket_thresholds(count, unit, divisor);
    std::copy(smallest.begin(), smallest.end(), to);
}

// numbers: HstuShapes. facts: strip rows, local bytes forward and backward, workspace bytes forward and backward, whether the
// cube's shapes fit, whether all parts of the workspace are aligned. Returns the error, or null.
const char* hstu_facts(const int64_t* numbers, double unit, double divisor, int64_t* facts) {
    const HstuShapes s = shapes_of(numbers);
    HstuTiling t;
    const char* error = hstu_tiling(t, s, {0.1, 1.0, unit, divisor});
    if (error != nullptr) return error;
    bool aligned = true;
    for (const bool backward : {false, true}) {
        const HstuWorkspace w = hstu_workspace(t, s.element_bytes, backward);
        for (const int64_t part : {w.scores, w.value_grads, w.weights, w.score_grads, w.sums, w.second_sums, w.distances, w.buckets,
                                   w.bytes})
            aligned = aligned && part % GLOBAL_BYTES == 0 && part <= w.bytes;
    }
    const bool fits =
        cube_shape_fits(t.pairs, s.element_bytes, HSTU_OBJECTS) && cube_shape_fits(t.sums, s.element_bytes, HSTU_OBJECTS);
    const int64_t all[] = {
        t.strip_rows,
        hstu_local_bytes(s, t.strip_rows, false),
        hstu_local_bytes(s, t.strip_rows, true),
        hstu_workspace_bytes(t, s.element_bytes, false),
        hstu_workspace_bytes(t, s.element_bytes, true),
        fits,
        aligned};
    std::copy(std::begin(all), std::end(all), facts);
    return nullptr;
}

// numbers: FuxiShapes. facts: strip rows, local bytes, workspace bytes forward and backward, whether the cube's shapes fit,
// whether all parts of the workspace are aligned and follow one another. Returns the error, or null.
const char* fuxi_facts(const int64_t* numbers, double unit, double divisor, int64_t* facts) {
    FuxiShapes s;
    static_assert(sizeof s == 9 * sizeof(int64_t));
    std::memcpy(&s, numbers, sizeof s);
    FuxiTiling t;
    const char* error = fuxi_tiling(t, s, {0.1, 1.0, unit, divisor});
    if (error != nullptr) return error;
    bool aligned = fuxi_channel_bytes(t, s.element_bytes) % GLOBAL_BYTES == 0;
    for (const bool backward : {false, true}) {
        const FuxiWorkspace w = fuxi_workspace(t, s.element_bytes, backward);
        int64_t begin = 0;
        for (const int64_t part : {w.scores, w.weights, w.shared_weights, w.sums}) {
            aligned = aligned && part % GLOBAL_BYTES == 0 && part >= begin && part < w.bytes;
            begin = part;
        }
        for (const int64_t part :
             {w.value_grads, w.score_grads, w.shared_grads, w.second_sums, w.distances, w.times, w.bytes}) {
            if (backward) aligned = aligned && part % GLOBAL_BYTES == 0 && part >= begin && part <= w.bytes;
            begin = part;
        }
    }
    const bool fits = cube_shape_fits(t.pairs, s.element_bytes, FUXI_OBJECTS) &&
                      cube_shape_fits(t.sums, s.element_bytes, FUXI_OBJECTS);
    const int64_t all[] = {t.strip_rows, fuxi_local_bytes(s, t.strip_rows), fuxi_workspace_bytes(t, s.element_bytes, false),
                           fuxi_workspace_bytes(t, s.element_bytes, true), fits, aligned};
    std::copy(std::begin(all), std::end(all), facts);
    return nullptr;
}

}  // extern "C"
