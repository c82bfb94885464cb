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
};

// Widths and row counts in whole vectors.
static inline int64_t padded(int64_t width) { return round_up(width, LANES); }

// Elements that a row of `width` factors takes when they follow each other in it, in whole vectors.
template <typename Element>
static inline int64_t row_elements(int64_t width) { return padded(padded(width) / FACTORS<Element>); }

// Rows [length, row_elements(width)] of one head (zeros behind them up to a whole vector of rows), transposed tile by tile: tile
// t is [row_elements(width), 64] at t * 64 * row_elements(width).
template <typename Element>
static inline void pack_transposed(const Element* rows, int64_t length, int64_t width, Element* to) {
    const int64_t stride = row_elements<Element>(width);
    for (int64_t j = 0; j < length; j += TILE)
        transpose(rows + j * stride, stride, padded(std::min<int64_t>(TILE, length - j)), stride, to + j * stride, TILE);
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

// to [64, 64] (+)= the rows of the tile's rows times the transposed rows of its columns; both have row_elements(width) a row.
template <typename Element>
static inline void scores(
    const Tile& tile, int64_t width, const Element* rows, const Element* transposed, float* to, bool add = false
) {
    const int vectors = static_cast<int>(padded(tile.columns) / LANES);
    const int64_t stride = row_elements<Element>(width), inner = (width + FACTORS<Element> - 1) / FACTORS<Element>;
    const RowMajor<Element> a{rows + tile.first_row * stride, stride};
    const Element* b = transposed + tile.first_column * stride;
    if (tile.diagonal()) product<Skip::columns_after_row>(tile.rows, vectors, inner, a, b, TILE, to, TILE, add);
    else product<Skip::nothing>(tile.rows, vectors, inner, a, b, TILE, to, TILE, add);
}

// to [rows of the tile, width] (+)= tile [64, 64 / FACTORS] times the rows of its columns [.. / FACTORS, width].
template <typename Element>
static inline void times_columns(const Tile& tile, int64_t width, const Element* values, const Element* rows, float* to, bool add) {
    constexpr int64_t EACH = FACTORS<Element>;
    const int64_t stride = padded(width), inner = (tile.columns + EACH - 1) / EACH;
    const int vectors = static_cast<int>(stride / LANES);
    const RowMajor<Element> a{values, TILE / EACH};
    const Element* b = rows + tile.first_column / EACH * stride;
    if (tile.diagonal()) product<Skip::inner_after_row>(tile.rows, vectors, inner, a, b, stride, to, stride, add);
    else product<Skip::nothing>(tile.rows, vectors, inner, a, b, stride, to, stride, add);
}

// to [columns of the tile, width] (+)= transposed tile [64 / FACTORS, 64] times the rows of its rows [.. / FACTORS, width].
template <typename Element>
static inline void times_rows(const Tile& tile, int64_t width, const Element* values, const Element* rows, float* to, bool add) {
    constexpr int64_t EACH = FACTORS<Element>;
    const int64_t stride = padded(width), inner = (tile.rows + EACH - 1) / EACH;
    const int vectors = static_cast<int>(stride / LANES);
    const ColumnMajor<Element> a{values, TILE};
    const Element* b = rows + tile.first_row / EACH * stride;
    if (tile.diagonal()) product<Skip::inner_before_row>(tile.columns, vectors, inner, a, b, stride, to, stride, add);
    else product<Skip::nothing>(tile.columns, vectors, inner, a, b, stride, to, stride, add);
}

}  // namespace turbogr
