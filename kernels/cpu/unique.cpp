// The distinct ids of a batch, rising, and the place of each id among them; on request the ids' positions grouped by id.
//
// Two ways. A bitmap of the table's rows while that is small beside the batch: a bit is set for every id, then the words' counts
// are added up, and the place of an id is the count before its word plus the bits below it. Otherwise a radix sort, least
// significant digit first, of keys that hold an id above its position. Both are single passes over memory that do not depend on
// how the work is shared out among threads.

#include "unique.h"

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <new>
#include <utility>

#include "rows.h"
#include "tasks.h"

namespace turbogr {
namespace {

// The bitmap costs a pass over num_rows / 64 words, the sort a few passes over the ids. Measured: equal at about so many rows.
constexpr int64_t ROWS_PER_ID = 64;

constexpr int64_t COUNT_PER_THREAD = 1 << 15;
constexpr int64_t NO_MEMORY = INT64_MIN;

constexpr int DIGIT_BITS = 11;
constexpr int64_t DIGITS = int64_t{1} << DIGIT_BITS;

struct Word {
    uint64_t bits;
    int64_t before;  // distinct ids below this word's
};

int bit_width(uint64_t x) { return x == 0 ? 0 : 64 - __builtin_clzll(x); }

int64_t by_bitmap(const TurbogrUnique& p) {
    const int64_t words = p.num_rows / 64 + 1;
    const std::unique_ptr<Word[], Free> map(static_cast<Word*>(std::calloc(static_cast<size_t>(words), sizeof(Word))));
    if (!map) return NO_MEMORY;
    for (int64_t i = 0; i < p.count; i++) {
        const int64_t id = p.ids[i];
        if (outside(id, p.num_rows)) return -1 - i;
        map[id >> 6].bits |= uint64_t{1} << (id & 63);
    }
    int64_t found = 0;
    for (int64_t w = 0; w < words; w++) {
        map[w].before = found;
        for (uint64_t bits = map[w].bits; bits != 0; bits &= bits - 1) p.unique[found++] = w * 64 + __builtin_ctzll(bits);
    }
    const int threads = static_cast<int>(std::clamp<int64_t>(p.count / COUNT_PER_THREAD, 1, p.threads));
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t i = 0; i < p.count; i++) {
        const Word& word = map[p.ids[i] >> 6];
        const uint64_t below = word.bits & ((uint64_t{1} << (p.ids[i] & 63)) - 1);
        p.inverse[i] = word.before + __builtin_popcountll(below);
    }
    return found;
}

// Positions grouped by place: a counting sort.
void group(const TurbogrUnique& p, int64_t found) {
    std::fill_n(p.starts, found + 1, 0);
    for (int64_t i = 0; i < p.count; i++) p.starts[p.inverse[i]]++;
    int64_t before = 0;
    for (int64_t u = 0; u <= found; u++) before += std::exchange(p.starts[u], before);
    for (int64_t i = 0; i < p.count; i++) p.order[p.starts[p.inverse[i]]++] = i;
    for (int64_t u = found; u > 0; u--) p.starts[u] = p.starts[u - 1];
    p.starts[0] = 0;
}

// Key holds an id above the `position_bits` of its position.
template <typename Key>
int64_t by_sorting(const TurbogrUnique& p, int position_bits) {
    const int passes = (bit_width(static_cast<uint64_t>(p.num_rows - 1)) + DIGIT_BITS - 1) / DIGIT_BITS;
    const std::unique_ptr<Key[]> memory(new (std::nothrow) Key[static_cast<size_t>(2 * p.count)]);
    const std::unique_ptr<int64_t[]> counts(new (std::nothrow) int64_t[static_cast<size_t>(passes * DIGITS)]());
    if (!memory || !counts) return NO_MEMORY;
    Key *keys = memory.get(), *sorted = keys + p.count;
    for (int64_t i = 0; i < p.count; i++) {
        const int64_t id = p.ids[i];
        if (outside(id, p.num_rows)) return -1 - i;
        keys[i] = static_cast<Key>(id) << position_bits | static_cast<Key>(i);
        for (int pass = 0; pass < passes; pass++) counts[pass * DIGITS + (id >> (pass * DIGIT_BITS) & (DIGITS - 1))]++;
    }
    for (int pass = 0; pass < passes; pass++) {
        int64_t* next = counts.get() + pass * DIGITS;
        if (*std::max_element(next, next + DIGITS) == p.count) continue;  // all keys share this digit
        int64_t before = 0;
        for (int64_t d = 0; d < DIGITS; d++) before += std::exchange(next[d], before);
        const int shift = position_bits + pass * DIGIT_BITS;
        for (int64_t i = 0; i < p.count; i++) sorted[next[static_cast<int64_t>(keys[i] >> shift) & (DIGITS - 1)]++] = keys[i];
        std::swap(keys, sorted);
    }
    const Key mask = (Key{1} << position_bits) - 1;
    int64_t found = 0, previous = -1;
    for (int64_t i = 0; i < p.count; i++) {
        const int64_t id = static_cast<int64_t>(keys[i] >> position_bits), position = static_cast<int64_t>(keys[i] & mask);
        if (id != previous) {
            p.unique[found] = previous = id;
            if (p.starts != nullptr) p.starts[found] = i;
            found++;
        }
        p.inverse[position] = found - 1;
        if (p.order != nullptr) p.order[i] = position;
    }
    if (p.starts != nullptr) p.starts[found] = p.count;
    return found;
}

}  // namespace
}  // namespace turbogr

using namespace turbogr;

int64_t turbogr_unique(const TurbogrUnique* problem) {
    const TurbogrUnique& p = *problem;
    if (p.num_rows / ROWS_PER_ID <= p.count) {
        const int64_t found = by_bitmap(p);
        if (found >= 0 && p.starts != nullptr) group(p, found);
        return found;
    }
    const int position_bits = bit_width(static_cast<uint64_t>(p.count));
    const bool narrow = position_bits + bit_width(static_cast<uint64_t>(p.num_rows - 1)) <= 64;
    return narrow ? by_sorting<uint64_t>(p, position_bits) : by_sorting<unsigned __int128>(p, position_bits);
}
