// Who sums what, where many numbers of positions are summed into rows.
//
// Row r is the sum over the positions starts(r) ... starts(r + 1). Its items are these positions and, at the end, writing it down.
// The items of all rows, in order, are cut evenly over the cores: rows without positions cost something, and a row of half the
// batch is shared by half the cores. A core has whole rows, which it writes itself, and at most two that it shares: the row that
// it begins within, and the one that it ends within. Whoever has the last item of a shared row adds up the cores' parts, in the
// order of the cores. Nothing is added atomically: the same starts and cores give the same bits.
#pragma once

#include <cstdint>

#include "align.h"
#include "even_parts.h"

namespace turbogr::ascend {

struct SumPart {
    int64_t first_row, last_row;  // the row of the first item, and of the item behind the last one (`rows` if there is none)
    int64_t first, last;          // positions
    int64_t items, row_item;      // of all cores together; the item with which first_row begins
    bool resumes;                 // earlier cores have items of first_row
    bool stops;                   // later cores have items of last_row, and this one has some
    bool empty;

    // The core has the last item of a row that others began.
    TURBOGR_SHARED bool completes() const { return resumes && first_row < last_row; }
};

// The row of an item, between `low` and `high`: the last one that begins at or before it. `starts.at(row)` for 0 <= row <= rows;
// `starts.near(low, high)` says what will be asked for from here on.
template <class Starts>
TURBOGR_SHARED int64_t row_of_item(Starts& starts, int64_t base, int64_t low, int64_t high, int64_t item) {
    while (low < high) {
        starts.near(low, high);
        const int64_t middle = (low + high + 1) / 2;
        if (starts.at(middle) - base + middle <= item) low = middle;
        else high = middle - 1;
    }
    return low;
}

template <class Starts>
TURBOGR_SHARED SumPart sum_part(Starts& starts, int64_t rows, int64_t cores, int64_t core) {
    const int64_t base = starts.at(0), items = starts.at(rows) - base + rows;
    const int64_t begin = even_cut(items, cores, core), end = even_cut(items, cores, core + 1);
    SumPart p{};
    p.items = items;
    p.empty = begin == end;
    if (p.empty) return p;
    // Every row has an item at least.
    p.first_row = row_of_item(starts, base, 0, smaller(rows, begin), begin);
    const int64_t first_start = starts.at(p.first_row);
    p.last_row = row_of_item(starts, base, p.first_row, smaller(rows, p.first_row + end - begin), end);
    p.first = begin - p.first_row + base;
    p.last = end - p.last_row + base;
    p.row_item = first_start - base + p.first_row;
    p.resumes = begin > p.row_item;
    p.stops = p.last_row < rows && p.last > starts.at(p.last_row);
    return p;
}

// The first core with an item of the first row of `core`.
TURBOGR_SHARED int64_t first_core_of(const SumPart& part, int64_t cores, int64_t core) {
    while (even_cut(part.items, cores, core) > part.row_item) core--;
    return core;
}

// Where parts of shared rows wait, in global memory: two rows of floats a core, twice, because a core may begin the next sum while
// another still completes the last one.
constexpr int64_t SHARED_ROWS = 2, SHARED_SUMS = 2;

struct SumTiling {
    int32_t width, pitch;    // columns of a row, and the distance of rows in local memory
    int32_t tile_rows;       // rows that are fetched at once, and sums that are written at once
    int32_t numbers;         // positions, starts and weights that are read at once
};

constexpr int64_t SUM_NUMBERS = 1024, SUM_MOST_ROWS = 64, SUM_MOST_WIDTH = 4096;
constexpr int64_t SEARCH_NUMBERS = 128;  // starts that a search reads one by one from global memory only while there are more

inline int64_t sum_workspace_bytes(const SumTiling& t, int64_t cores) {
    return round_up(SHARED_SUMS * cores * SHARED_ROWS * t.pitch * 4, GLOBAL_BYTES);
}

// Bytes of local memory that SegmentSums asks for.
inline int64_t sum_local_bytes(const SumTiling& t, int64_t element_bytes, bool weighted) {
    const int64_t row = t.pitch * 4, narrow_row = t.pitch * element_bytes;
    int64_t bytes = t.tile_rows * (2 * narrow_row + row + 2 * narrow_row) + 2 * row;  // fetched, sums, written; shared rows
    bytes += 2 * t.numbers * 8;                                                       // positions, starts
    if (weighted) bytes += t.numbers * (element_bytes == 4 ? 4 : 4 + element_bytes);
    if (element_bytes != 4) bytes += t.tile_rows * row;  // fetched rows as floats
    return bytes;
}

// As many rows at once as there is room for. Returns null, or what is wrong.
inline const char* sum_tiling(SumTiling& t, int64_t width, int64_t element_bytes, bool weighted) {
    if (element_bytes != 2 && element_bytes != 4) return "rows must be float32, float16 or bfloat16";
    if (width < 1 || width > SUM_MOST_WIDTH) return "rows have 1 to 4096 columns";
    t = SumTiling{
        static_cast<int32_t>(width), static_cast<int32_t>(round_up(width, COPY_BYTES / element_bytes)),
        static_cast<int32_t>(SUM_MOST_ROWS), static_cast<int32_t>(SUM_NUMBERS)};
    while (t.tile_rows > 1 && sum_local_bytes(t, element_bytes, weighted) > LOCAL_BYTES) t.tile_rows /= 2;
    return nullptr;
}

}  // namespace turbogr::ascend
