// The tiling of FuXi's attention as a plain function, for test_fuxi_tiling.py.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <iterator>

#include "host/driver.h"

#include "jagged_fuxi_attention/op_host/jagged_fuxi_attention_tiling.h"

using namespace turbogr::ascend;

// numbers: FuxiShapes. facts: strip rows, local bytes, workspace bytes forward and backward, whether the cube's shapes fit,
// whether all parts of the workspace are aligned and follow one another. Returns the error, or null.
extern "C" const char* fuxi_facts(const int64_t* numbers, double unit, double divisor, int64_t* facts) {
    FuxiShapes s;
    static_assert(sizeof s == 9 * sizeof(int64_t));
    std::memcpy(&s, numbers, sizeof s);
    FuxiTiling t;
    const char* error = fuxi_tiling(t, s, {0.1, 1.0, unit, divisor});
    if (error != nullptr) return error;
    bool aligned = fuxi_channel_bytes(t, s.element_bytes) % GLOBAL_BYTES == 0;
    for (const bool backward : {false, true}) {
        const FuxiWorkspace w = fuxi_workspace(t, s.element_bytes, backward);
        int64_t begin = 0;
        for (const int64_t part : {w.scores, w.weights, w.shared_weights, w.sums}) {
            aligned = aligned && part % GLOBAL_BYTES == 0 && part >= begin && part < w.bytes;
            begin = part;
        }
        for (const int64_t part :
             {w.value_grads, w.score_grads, w.shared_grads, w.second_sums, w.distances, w.times, w.bytes}) {
            if (backward) aligned = aligned && part % GLOBAL_BYTES == 0 && part >= begin && part <= w.bytes;
            begin = part;
        }
    }
    const bool fits = cube_shape_fits(t.pairs, s.element_bytes, FUXI_OBJECTS) &&
                      cube_shape_fits(t.sums, s.element_bytes, FUXI_OBJECTS);
    const int64_t all[] = {t.strip_rows, fuxi_local_bytes(s, t.strip_rows), fuxi_workspace_bytes(t, s.element_bytes, false),
                           fuxi_workspace_bytes(t, s.element_bytes, true), fits, aligned};
    std::copy(std::begin(all), std::end(all), facts);
    return nullptr;
}
