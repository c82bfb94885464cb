// How work that has no shape of its own is spread over cores: evenly, and so that every core can tell its part alone.
#pragma once

#include <cstdint>

#include "align.h"

namespace turbogr::ascend {

struct Part {
    int64_t begin, end;

    TURBOGR_SHARED int64_t count() const { return end - begin; }
};

// Core `core`'s part of [begin, end). Parts differ by at most one; the longer ones begin at core begin % cores. Of ranges that
// follow each other, those of all ranges together differ by at most one, too, however short the ranges are.
TURBOGR_SHARED Part even_part(int64_t begin, int64_t end, int64_t cores, int64_t core) {
    const int64_t place = (core + cores - begin % cores) % cores, each = (end - begin) / cores, longer = (end - begin) % cores;
    const int64_t first = begin + place * each + smaller(place, longer);
    return {first, first + each + (place < longer ? 1 : 0)};
}

// Parts in the order of the cores: core c's of [0, count) begins here and ends where core c + 1's begins.
TURBOGR_SHARED int64_t even_cut(int64_t count, int64_t cores, int64_t core) {
    return count / cores * core + count % cores * core / cores;
}

}  // namespace turbogr::ascend
