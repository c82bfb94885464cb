// The tiles of pairs that a task of causal attention goes through.
#pragma once

#include <cstdint>

#include "align.h"
#include "row_block.h"

namespace turbogr::ascend {

// Keys key ... key + keys and queries query ... query + queries of a sequence, a row for each key and a column for each query.
// key and query are multiples of TILE. A square tile has at most TILE of each.
struct PairTile {
    int64_t key, keys, query, queries;

    // Of a square: whether there are pairs whose key is behind the query.
    TURBOGR_SHARED bool diagonal() const { return key == query; }
};

// A block of queries meets TILE keys after TILE keys; a block of keys meets TILE queries after TILE queries, the last ones first.
// So the first tile has all rows of the block, and what is summed over tiles can begin with it.
struct TileWalk {
    RowBlock block;
    bool by_keys;

    TURBOGR_SHARED int64_t end() const { return smaller(block.first + BLOCK_ROWS, block.length); }
    TURBOGR_SHARED int64_t rows() const { return end() - block.first; }
    TURBOGR_SHARED int64_t count() const { return ceil_divide(by_keys ? block.length - block.first : end(), TILE); }

    // Room for the columns of a tile.
    TURBOGR_SHARED int64_t stride() const { return by_keys ? TILE : BLOCK_ROWS; }

    TURBOGR_SHARED PairTile tile(int64_t i) const {
        if (by_keys) {
            const int64_t query = block.first + (count() - 1 - i) * TILE, queries = smaller(TILE, block.length - query);
            return {block.first, smaller(end(), query + queries) - block.first, query, queries};
        }
        const int64_t key = i * TILE, query = larger(block.first, key);
        return {key, smaller(TILE, end() - key), query, end() - query};
    }
};

}  // namespace turbogr::ascend
