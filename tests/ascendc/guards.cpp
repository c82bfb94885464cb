// Kernels that break one rule each, for test_stand_in.py, and the same kernels without the mistake.

#include <algorithm>
#include <atomic>
#include <functional>
#include <map>
#include <string>

#include "guards_global.h"
#include "guards_limits.h"
#include "guards_local.h"
#include "guards_matmul.h"
#include "guards_pipes.h"
#include "host/driver.h"

// Runs the kernel `name` on two cores, as it should be or with its mistake.
extern "C" void run_guard(const char* name, int64_t wrong, int64_t seed, host::Outcome* outcome) {
    host::report(outcome, [&] {
        std::map<std::string, guards::Case> cases;
        guards::add_local(cases);
        guards::add_queues(cases);
        guards::add_events(cases);
        guards::add_vector(cases);
        guards::add_global(cases);
        guards::add_launches(cases);
        guards::add_matmul(cases);
        guards::add_pipes(cases);
        guards::add_caches(cases);
        guards::add_limits_of_copies(cases);
        guards::add_limits_of_the_vector_unit(cases);
        guards::add_limits_of_products(cases);
        if (cases.count(name) == 0) throw std::runtime_error(std::string("no case ") + name);
        guards::Memory memory;
        const auto& kernel = cases[name];
        const auto counters = host::launch(2, [&] { kernel(memory, wrong != 0); }, {.seed = seed});
        memory.output_allocation.require_written("the output");
        return counters;
    });
}

// A launch that is not one.
extern "C" void run_outside(host::Outcome* outcome) {
    host::report(outcome, [] {
        AscendC::SyncAll();
        return host::Counters();
    });
}

// Memory that is registered twice.
extern "C" void run_twice(host::Outcome* outcome) {
    host::report(outcome, [] {
        float x[16];
        const auto first = host::global(x, sizeof x), second = host::global(x + 8, 16);
        return host::Counters();
    });
}

// What the vector unit of the device cannot do does not compile.
namespace {
template <class T>
concept AddsUp = requires(AscendC::LocalTensor<T> x) { AscendC::Add(x, x, x, 1); };
template <class T, class U>
concept Casts = requires(AscendC::LocalTensor<T> x, AscendC::LocalTensor<U> y) {
    AscendC::Cast(x, y, AscendC::RoundMode::CAST_RINT, 1);
};
template <class T, class S>
concept Scales = requires(AscendC::LocalTensor<T> x, S scalar) { AscendC::Muls(x, x, scalar, 1); };
static_assert(AddsUp<float> && AddsUp<half> && AddsUp<int32_t>);
static_assert(!AddsUp<bfloat16_t> && !AddsUp<int64_t> && !AddsUp<double> && !AddsUp<uint32_t>);
static_assert(Casts<bfloat16_t, float> && Casts<int32_t, float> && Casts<int32_t, int64_t>);
static_assert(!Casts<half, bfloat16_t> && !Casts<float, double> && !Casts<bfloat16_t, int32_t>);
static_assert(Scales<float, float> && !Scales<float, double>);
}  // namespace

// y = exp(x), in rows of 50 dealt out to the cores: no mistake.
extern "C" void run_exponential(float* x, float* y, int64_t count, int64_t cores, int64_t seed, host::Outcome* outcome) {
    using namespace AscendC;
    host::report(outcome, [&] {
        const auto input = host::global(x, 4 * count);
        const auto output = host::unwritten(y, 4 * count);
        const auto counters = host::launch(
            cores,
            [&] {
                TPipe pipe;
                TQue<TPosition::VECIN, 2> in;
                TQue<TPosition::VECOUT, 2> out;
                pipe.InitBuffer(in, 2, 256);
                pipe.InitBuffer(out, 2, 256);
                const auto from = guards::tensor(x, count), to = guards::tensor(y, count);
                for (int64_t i = GetBlockIdx() * 50; i < count; i += GetBlockNum() * 50) {
                    const auto row = static_cast<uint32_t>(std::min<int64_t>(50, count - i));
                    auto a = in.AllocTensor<float>();
                    DataCopyPad(a, from[i], DataCopyExtParams(1, 4 * row, 0, 0, 0), DataCopyPadExtParams<float>());
                    in.EnQue(a);
                    a = in.DeQue<float>();
                    auto b = out.AllocTensor<float>();
                    Exp(b, a, static_cast<int32_t>(row));
                    in.FreeTensor(a);
                    out.EnQue(b);
                    b = out.DeQue<float>();
                    DataCopyPad(to[i], b, DataCopyExtParams(1, 4 * row, 0, 0, 0));
                    out.FreeTensor(b);
                }
            },
            {.seed = seed});
        output.require_written("y");
        return counters;
    });
}

// When each core came, before and behind a SyncAll. Not through global memory: cores count together, which no kernel can.
extern "C" void run_order(int64_t* out, int64_t cores, int64_t seed, host::Outcome* outcome) {
    host::report(outcome, [&] {
        std::atomic<int64_t> count = 0;
        return host::launch(
            cores,
            [&] {
                const int64_t core = AscendC::GetBlockIdx();
                out[core] = count++ % cores;
                AscendC::SyncAll();
                out[cores + core] = count++ % cores;
            },
            {.seed = seed});
    });
}

// One core fails, all others wait for it.
extern "C" void run_failing(int64_t cores, int64_t failing, host::Outcome* outcome) {
    host::report(outcome, [&] {
        return host::launch(cores, [&] {
            if (AscendC::GetBlockIdx() == failing) AscendC::WaitFlag<AscendC::HardEvent::V_S>(0);
            AscendC::SyncAll();
        });
    });
}
