// Interface of the kernel that finds distinct ids: plain C on raw pointers, called through ctypes (turbogr/ops/unique_native.py
// mirrors the struct).
#pragma once

#include <cstdint>

extern "C" {

struct TurbogrUnique {
    const int64_t* ids;  // [count], each in [0, num_rows)
    int64_t count, num_rows;
    int64_t* unique;   // [min(count, num_rows)]; the distinct ids, rising, stand at its beginning
    int64_t* inverse;  // [count], place of each id among them
    // [count] positions of the ids grouped by id, rising in each group, and [min(count, num_rows) + 1] where each group begins
    // and the last one ends; both null where they are not wanted.
    int64_t *order, *starts;
    int64_t threads;
};

// The number of distinct ids; -1 - i if ids[i] is the first one outside [0, num_rows); INT64_MIN if there was no memory for scratch.
int64_t turbogr_unique(const TurbogrUnique* problem);
}
