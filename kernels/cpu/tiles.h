// Tiles of 64 x 64 scores, the packing of heads and the products that tiles take part in.
#pragma once

#include "matmul.h"
#include "tasks.h"
#include "vectors.h"

namespace turbogr {

struct Tile {
    int64_t first_row, rows, first_column, columns;
    bool diagonal() const { return first_row == first_column; }
    // How many columns of this row (counted within the tile) lie on or below the diagonal.
    int64_t limit(int64_t row) const { return std::min(columns, first_row + row - first_column + 1); }
    // Some of its rows.
    Tile strip(int64_t first, int64_t count) const { return {first_row + first, count, first_column, columns}; }
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
    // For data of a type that is known at run time only.
    template <typename Element>
    Heads<Element> of() const { return {static_cast<Element*>(data), row, head, width}; }
};

// Rows of one head of a task, times a factor, padded to `rows` rows.
template <typename From = float>
static inline void pack_head(const Heads<const From>& x, const Task& task, int64_t h, float factor, float* to, int64_t rows) {
    pack(x.at(task.first_token, task.first_head + h), x.row, task.length, x.width, factor, to, padded(x.width), rows);
}

// The reverse for `rows` rows from row `first` of the task's sequence on.
template <typename To = float>
static inline void unpack_head(
    const float* from, float factor, const Heads<To>& x, const Task& task, int64_t h, int64_t first, int64_t rows
) {
    unpack(from, padded(x.width), rows, x.width, factor, x.at(task.first_token + first, task.first_head + h), x.row);
}

// to [64, 64] (+)= the rows of the tile's rows times the transposed rows of its columns.
static inline void scores(
    const Tile& tile, int64_t width, const float* rows, const float* transposed, float* to, bool add = false
) {
    const int vectors = static_cast<int>(padded(tile.columns) / LANES);
    const RowMajor a{rows + tile.first_row * padded(width), padded(width)};
    const float* b = transposed + tile.first_column * padded(width);
    const int64_t shift = tile.first_row - tile.first_column;
    if (tile.limit(0) < tile.columns) product<Skip::columns_after_row>(tile.rows, vectors, width, a, b, TILE, to, TILE, add, shift);
    else product<Skip::nothing>(tile.rows, vectors, width, a, b, TILE, to, TILE, add);
}

// to [rows of the tile, width] (+)= tile [64, 64] times the rows of its columns.
static inline void times_columns(const Tile& tile, int64_t width, const float* values, const float* rows, float* to, bool add) {
    const int vectors = static_cast<int>(padded(width) / LANES);
    const RowMajor a{values, TILE};
    const float* b = rows + tile.first_column * padded(width);
    const int64_t stride = padded(width);
    if (tile.diagonal()) product<Skip::inner_after_row>(tile.rows, vectors, tile.columns, a, b, stride, to, stride, add);
    else product<Skip::nothing>(tile.rows, vectors, tile.columns, a, b, stride, to, stride, add);
}

// to [columns of the tile, width] (+)= transposed tile times the rows of its rows.
static inline void times_rows(const Tile& tile, int64_t width, const float* values, const float* rows, float* to, bool add) {
    const int vectors = static_cast<int>(padded(width) / LANES);
    const ColumnMajor a{values, TILE};
    const float* b = rows + tile.first_row * padded(width);
    const int64_t stride = padded(width);
    if (tile.diagonal()) product<Skip::inner_before_row>(tile.columns, vectors, tile.rows, a, b, stride, to, stride, add);
    else product<Skip::nothing>(tile.columns, vectors, tile.rows, a, b, stride, to, stride, add);
}

}  // namespace turbogr
