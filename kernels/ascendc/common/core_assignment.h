// Which core computes which rows of a batch of causal attention.
//
// Every sequence is cut into blocks of BLOCK_ROWS rows, the last one shorter. A block of queries costs as many pairs as its rows
// have keys, a block of keys as many as it has queries: of n rows from the sequence's first (of queries) or last (of keys)
// together n (n + 1) / 2. Blocks are dealt out greedily, the most expensive first, each to the core with the least so far.
// Ties go to the earlier block and the lower core: the same lengths and cores give the same plan.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <numeric>
#include <queue>
#include <utility>
#include <vector>

#include "row_block.h"

namespace turbogr::ascend {

enum class BlockOf { QUERIES, KEYS };

struct CoreAssignment {
    std::vector<std::vector<RowBlock>> blocks;  // by core, in the order in which they run
    std::vector<int64_t> pairs;                 // by core

    int64_t most() const { return pairs.empty() ? 0 : *std::max_element(pairs.begin(), pairs.end()); }
    int64_t total() const { return std::accumulate(pairs.begin(), pairs.end(), int64_t{0}); }

    // What kernels read: cores + 1 numbers, core c's blocks being those from number c to number c + 1; then the blocks.
    std::vector<int32_t> packed() const {
        std::vector<int32_t> plan{0};
        for (const auto& of_core : blocks) plan.push_back(plan.back() + static_cast<int32_t>(of_core.size()));
        for (const auto& of_core : blocks)
            for (const RowBlock& x : of_core) plan.insert(plan.end(), {x.token, x.length, x.first});
        return plan;
    }
};

// Pairs (query, key <= query) of rows first ... end of a sequence.
inline int64_t causal_pairs(BlockOf kind, int64_t length, int64_t first, int64_t end) {
    const auto triangle = [](int64_t n) { return n * (n + 1) / 2; };
    return kind == BlockOf::QUERIES ? triangle(end) - triangle(first) : triangle(length - first) - triangle(length - end);
}

// offsets [sequences + 1] rise from 0.
inline CoreAssignment assign_row_blocks(BlockOf kind, const int64_t* offsets, int64_t sequences, int64_t cores) {
    struct Costly {
        int64_t pairs;
        RowBlock block;
    };
    std::vector<Costly> all;
    for (int64_t s = 0; s < sequences; s++) {
        const int64_t length = offsets[s + 1] - offsets[s];
        for (int64_t first = 0; first < length; first += BLOCK_ROWS) {
            const int64_t pairs = causal_pairs(kind, length, first, std::min(first + BLOCK_ROWS, length));
            all.push_back({pairs, {static_cast<int32_t>(offsets[s]), static_cast<int32_t>(length), static_cast<int32_t>(first)}});
        }
    }
    std::stable_sort(all.begin(), all.end(), [](const Costly& x, const Costly& y) { return x.pairs > y.pairs; });

    CoreAssignment result;
    result.blocks.resize(static_cast<size_t>(cores));
    result.pairs.assign(static_cast<size_t>(cores), 0);
    using Load = std::pair<int64_t, int64_t>;  // pairs so far, core
    std::priority_queue<Load, std::vector<Load>, std::greater<Load>> least;
    for (int64_t c = 0; c < cores; c++) least.push({0, c});
    for (const Costly& x : all) {
        const int64_t core = least.top().second, load = least.top().first + x.pairs;
        least.pop();
        least.push({load, core});
        result.blocks[static_cast<size_t>(core)].push_back(x.block);
        result.pairs[static_cast<size_t>(core)] = load;
    }
    return result;
}

}  // namespace turbogr::ascend
