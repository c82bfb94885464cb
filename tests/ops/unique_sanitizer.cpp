// Runs the kernel of distinct ids over awkward batches on heap buffers of exact size, so that a sanitizer sees every access
// outside, and checks what it found. With an argument, the buffer of places is one short: that must be noticed.

#include "unique.h"

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <random>
#include <vector>

namespace {

std::mt19937_64 generator(7);

std::unique_ptr<int64_t[]> buffer(int64_t count) { return std::unique_ptr<int64_t[]>(new int64_t[count]); }

bool right(int64_t count, int64_t num_rows, bool segments, int64_t missing) {
    const auto ids = buffer(count);
    for (int64_t i = 0; i < count; i++) ids[i] = static_cast<int64_t>(generator() % static_cast<uint64_t>(num_rows));
    if (count > 1) ids[0] = 0, ids[count - 1] = num_rows - 1;
    const int64_t most = std::min(count, num_rows);
    const auto unique = buffer(most), inverse = buffer(count - missing), order = buffer(count), starts = buffer(most + 1);
    TurbogrUnique p{ids.get(), count, num_rows, unique.get(), inverse.get(), nullptr, nullptr, 2};
    if (segments) p.order = order.get(), p.starts = starts.get();
    const int64_t found = turbogr_unique(&p);
    std::vector<int64_t> expected(ids.get(), ids.get() + count);
    std::sort(expected.begin(), expected.end());
    expected.erase(std::unique(expected.begin(), expected.end()), expected.end());
    if (!std::equal(expected.begin(), expected.end(), unique.get(), unique.get() + found)) return false;
    for (int64_t i = 0; i < count; i++)
        if (unique[inverse[i]] != ids[i]) return false;
    for (int64_t u = 0; segments && u < found; u++)
        for (int64_t i = starts[u]; i < starts[u + 1]; i++)
            if (ids[order[i]] != unique[u] || (i > starts[u] && order[i] < order[i - 1])) return false;
    if (count == 0) return found == 0;
    const int64_t wrong = static_cast<int64_t>(generator() % static_cast<uint64_t>(count));
    for (const int64_t outside : {int64_t{-1}, INT64_MIN, num_rows, INT64_MAX}) {
        if (outside == INT64_MAX && num_rows == INT64_MAX) continue;
        ids[wrong] = outside;
        if (turbogr_unique(&p) != -1 - wrong) return false;
    }
    return true;
}

}  // namespace

int main(int count, char**) {
    if (count > 1) return right(1000, 100, false, 1) ? 0 : 1;
    int checked = 0;
    for (const int64_t ids : {0, 1, 2, 63, 64, 65, 1000, 100000})
        for (const int64_t rows : {int64_t{1}, int64_t{63}, int64_t{64}, int64_t{65}, int64_t{5000}, int64_t{1} << 23, int64_t{1} << 40,
                                   int64_t{1} << 60, INT64_MAX})
            for (const bool segments : {false, true}) {
                if (!right(ids, rows, segments, 0)) {
                    std::fprintf(stderr, "failed: %lld ids of %lld rows\n", static_cast<long long>(ids), static_cast<long long>(rows));
                    return 1;
                }
                checked++;
            }
    std::printf("checked %d problems\n", checked);
    return 0;
}
