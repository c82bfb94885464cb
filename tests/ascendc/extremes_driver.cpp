// ReduceMax and ReduceMin of the stand-in, for test_extremes.py.

#include "kernel_operator.h"

#include "host/driver.h"

#include "common/strips.h"

using namespace AscendC;
using turbogr::ascend::fence;

// x [count] and to [2]: the largest and the least. mistake: 1 asks for no elements, 2 for an index, 3 reads the work space.
extern "C" void extremes(const float* x, float* to, int64_t count, int64_t mistake, host::Outcome* outcome) {
    host::report(outcome, [&] {
        const auto input = host::global(x, 4 * count), output = host::unwritten(to, 8);
        return host::launch(1, [&] {
            TPipe pipe;
            TBuf<> buffer;
            pipe.InitBuffer(buffer, static_cast<uint32_t>(8 * count + 64));
            GlobalTensor<float> from, results;
            from.SetGlobalBuffer(const_cast<float*>(x), static_cast<uint64_t>(count));
            results.SetGlobalBuffer(to, 2);
            const auto values = buffer.Get<float>(), work = values[count], found = values[2 * count];
            DataCopy(values, from, static_cast<uint32_t>(count));
            fence<HardEvent::MTE2_V>(&pipe);
            const int32_t n = mistake == 1 ? 0 : static_cast<int32_t>(count);
            ReduceMax(found, values, work, n, mistake == 2);
            ReduceMin(found[8], values, work, n);
            if (mistake == 3) Adds(work, work, 0.0f, 1);
            fence<HardEvent::V_MTE3>(&pipe);
            turbogr::ascend::store_rows(results, 1, found, 8, 2, 1);
        });
    });
}
