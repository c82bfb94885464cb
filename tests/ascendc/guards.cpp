// Kernels that break one rule each, for test_stand_in.py, and what they are without the mistake.

#include <vector>

#include "host/driver.h"
#include "kernel_operator.h"

using namespace AscendC;

namespace {

// y = exp(x), in rows of 50 dealt out to the cores.
void exponential(const float* x, float* y, int64_t count) {
    TPipe pipe;
    TQue<TPosition::VECIN, 2> in;
    TQue<TPosition::VECOUT, 2> out;
    pipe.InitBuffer(in, 2, 256);
    pipe.InitBuffer(out, 2, 256);
    GlobalTensor<float> from, to;
    from.SetGlobalBuffer(const_cast<float*>(x), static_cast<uint64_t>(count));
    to.SetGlobalBuffer(y, static_cast<uint64_t>(count));
    for (int64_t i = GetBlockIdx() * 50; i < count; i += GetBlockNum() * 50) {
        const DataCopyExtParams row(1, static_cast<uint32_t>(4 * std::min<int64_t>(50, count - i)), 0, 0, 0);
        auto a = in.AllocTensor<float>();
        DataCopyPad(a, from[i], row, DataCopyPadExtParams<float>());
        in.EnQue(a);
        a = in.DeQue<float>();
        auto b = out.AllocTensor<float>();
        Exp(b, a, static_cast<int32_t>(row.blockLen / 4));
        in.FreeTensor(a);
        out.EnQue(b);
        b = out.DeQue<float>();
        DataCopyPad(to[i], b, row);
        out.FreeTensor(b);
    }
}

}  // namespace

extern "C" void run_exponential(const float* x, float* y, int64_t count, int64_t cores, int64_t seed, host::Outcome* outcome) {
    host::report(outcome, [&] {
        const auto input = host::global(x, 4 * count);
        const auto output = host::unwritten(y, 4 * count);
        const auto counters = host::launch(cores, [&] { exponential(x, y, count); }, {.seed = seed});
        output.require_written("y");
        return counters;
    });
}
