// Which core computes which rows of a batch of causal attention.
//
// Every sequence is cut into blocks of BLOCK_ROWS rows, the last one shorter. A block of queries costs as many pairs as its rows
// have keys, a block of keys as many as it has queries: of n rows from the sequence's first (of queries) or last (of keys)
// together n (n + 1) / 2. Blocks are dealt out greedily, the most expensive first, each to the core with the least so far.
// Where few blocks meet many cores that leaves some percent: then blocks of the core with most change places with smaller ones of
// others. Ties go to the earlier block and the lower core: the same lengths and cores give the same plan.
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

struct CostlyBlock {
    int64_t pairs;
    RowBlock block;
};

struct CoreLoad {
    std::vector<CostlyBlock> blocks;
    int64_t pairs = 0;
};

// While the core with most is more than ENOUGH above the mean: the exchange of one of its blocks for another core's smaller one, or
// for none, after which the busier of the two has least.
inline void exchange_blocks(std::vector<CoreLoad>& loads) {
    constexpr double ENOUGH = 1.01;
    constexpr int MOST_EXCHANGES = 1000;
    int64_t total = 0;
    for (const CoreLoad& load : loads) total += load.pairs;
    for (int round = 0; round < MOST_EXCHANGES; round++) {
        const auto most = std::max_element(
            loads.begin(), loads.end(), [](const CoreLoad& x, const CoreLoad& y) { return x.pairs < y.pairs; });
        if (static_cast<double>(most->pairs) * static_cast<double>(loads.size()) <= ENOUGH * static_cast<double>(total)) return;
        struct Exchange {
            int64_t busier;
            CoreLoad* with;
            size_t mine, theirs;  // theirs: one behind the last for none
        } best{most->pairs, nullptr, 0, 0};
        for (CoreLoad& other : loads) {
            if (&other == &*most) continue;
            for (size_t mine = 0; mine < most->blocks.size(); mine++) {
                for (size_t theirs = 0; theirs <= other.blocks.size(); theirs++) {
                    const int64_t back = theirs < other.blocks.size() ? other.blocks[theirs].pairs : 0;
                    const int64_t moved = most->blocks[mine].pairs - back;
                    const int64_t busier = std::max(most->pairs - moved, other.pairs + moved);
                    if (moved > 0 && busier < best.busier) best = {busier, &other, mine, theirs};
                }
            }
        }
        if (best.with == nullptr) return;
        const CostlyBlock given = most->blocks[best.mine];
        most->blocks.erase(most->blocks.begin() + static_cast<int64_t>(best.mine));
        most->pairs -= given.pairs;
        if (best.theirs < best.with->blocks.size()) {
            const CostlyBlock taken = best.with->blocks[best.theirs];
            best.with->blocks.erase(best.with->blocks.begin() + static_cast<int64_t>(best.theirs));
            best.with->pairs -= taken.pairs;
            most->blocks.push_back(taken);
            most->pairs += taken.pairs;
        }
        best.with->blocks.push_back(given);
        best.with->pairs += given.pairs;
    }
}

// offsets [sequences + 1] rise from 0.
inline CoreAssignment assign_row_blocks(BlockOf kind, const int64_t* offsets, int64_t sequences, int64_t cores) {
    std::vector<CostlyBlock> all;
    for (int64_t s = 0; s < sequences; s++) {
        const int64_t length = offsets[s + 1] - offsets[s];
        for (int64_t first = 0; first < length; first += BLOCK_ROWS) {
            const int64_t pairs = causal_pairs(kind, length, first, std::min(first + BLOCK_ROWS, length));
            all.push_back({pairs, {static_cast<int32_t>(offsets[s]), static_cast<int32_t>(length), static_cast<int32_t>(first)}});
        }
    }
    std::stable_sort(all.begin(), all.end(), [](const CostlyBlock& x, const CostlyBlock& y) { return x.pairs > y.pairs; });

    std::vector<CoreLoad> loads(static_cast<size_t>(cores));
    using Load = std::pair<int64_t, size_t>;  // pairs so far, core
    std::priority_queue<Load, std::vector<Load>, std::greater<Load>> least;
    for (size_t c = 0; c < loads.size(); c++) least.push({0, c});
    for (const CostlyBlock& x : all) {
        CoreLoad& load = loads[least.top().second];
        const size_t core = least.top().second;
        least.pop();
        load.blocks.push_back(x);
        load.pairs += x.pairs;
        least.push({load.pairs, core});
    }
    exchange_blocks(loads);

    CoreAssignment result;
    for (const CoreLoad& load : loads) {
        result.pairs.push_back(load.pairs);
        result.blocks.emplace_back();
        for (const CostlyBlock& x : load.blocks) result.blocks.back().push_back(x.block);
    }
    return result;
}

}  // namespace turbogr::ascend
