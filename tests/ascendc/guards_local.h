// Mistakes with local memory, queues, flags and calls of the vector unit. See guards.cpp.
#pragma once

#include <functional>
#include <map>
#include <string>

#include "kernel_operator.h"

namespace guards {

using namespace AscendC;

constexpr int64_t COUNT = 256;

// Global memory of a case: an input that holds something, an output that must be filled, counts that may be added to,
// workspace.
struct Memory {
    alignas(64) float input[COUNT] = {}, output[COUNT] = {}, sums[COUNT] = {};
    host::Workspace workspace{4 * COUNT};
    host::Allocation input_allocation = host::global(input, sizeof input);
    host::Allocation output_allocation = host::unwritten(output, sizeof output);
    host::Allocation sums_allocation = host::global(sums, sizeof sums);
};

using Case = std::function<void(Memory&, bool wrong)>;
using Cases = std::map<std::string, Case>;

inline GlobalTensor<float> tensor(float* memory, int64_t count = COUNT) {
    GlobalTensor<float> x;
    x.SetGlobalBuffer(memory, static_cast<uint64_t>(count));
    return x;
}

// The second pipe of the event waits for the first.
template <HardEvent kind>
void fence() {
    SetFlag<kind>(EVENT_ID7);
    WaitFlag<kind>(EVENT_ID7);
}

// What each case begins with: a kernel that copies its half of the input, doubled, to the output.
struct Bench {
    static constexpr int32_t N = 64;

    explicit Bench(Memory& memory) : input(tensor(memory.input)), output(tensor(memory.output)) {
        pipe.InitBuffer(in, 2, 4 * N);
        pipe.InitBuffer(out, 1, 4 * N);
        pipe.InitBuffer(calc, 4 * N);
        work = calc.Get<float>();
        Duplicate(work, 1.0f, N);
        for (int64_t i = GetBlockIdx() * N; i < COUNT; i += GetBlockNum() * N) {
            auto x = fetched(i);
            auto y = out.AllocTensor<float>();
            Muls(y, x, 2.0f, N);
            in.FreeTensor(x);
            out.EnQue(y);
            y = out.DeQue<float>();
            DataCopy(output[i], y, N);
            out.FreeTensor(y);
        }
    }
    LocalTensor<float> fetched(int64_t i) {
        auto x = in.AllocTensor<float>();
        DataCopy(x, input[i], N);
        in.EnQue(x);
        return in.DeQue<float>();
    }

    TPipe pipe;
    TQue<TPosition::VECIN, 2> in;
    TQue<TPosition::VECOUT, 1> out;
    TBuf<> calc;
    GlobalTensor<float> input, output;
    LocalTensor<float> work;
};

inline void add_local(Cases& cases) {
    cases["local vector out of bounds"] = [](Memory& m, bool wrong) {
        Bench b(m);
        Adds(b.work[32], b.work[32], 1.0f, wrong ? 40 : 32);
    };
    cases["local scalar read out of bounds"] = [](Memory& m, bool wrong) {
        Bench b(m);
        fence<HardEvent::V_S>();
        b.work.GetValue(wrong ? 64 : 63);
    };
    cases["local scalar write out of bounds"] = [](Memory& m, bool wrong) {
        Bench b(m);
        fence<HardEvent::V_S>();
        b.work.SetValue(wrong ? 64 : 63, 0.0f);
    };
    cases["local outside of its buffer"] = [](Memory& m, bool wrong) {
        Bench b(m);
        b.work.SetSize(wrong ? 128 : 64);
        Duplicate(b.work, 0.0f, static_cast<int32_t>(b.work.GetSize()));
    };
    cases["local without memory"] = [](Memory& m, bool wrong) {
        Bench b(m);
        Duplicate(wrong ? LocalTensor<float>() : b.work, 0.0f, 8);
    };
    cases["local never written"] = [](Memory& m, bool wrong) {
        Bench b(m);
        TBuf<> other;
        b.pipe.InitBuffer(other, 256);
        auto x = other.Get<float>();
        Duplicate(x, 0.0f, wrong ? 56 : 64);
        Add(b.work, b.work, x, 64);
    };
    cases["local never written since it was allocated"] = [](Memory& m, bool wrong) {
        Bench b(m);
        auto x = b.fetched(0);
        b.in.FreeTensor(x);
        x = b.in.AllocTensor<float>();
        if (!wrong) Duplicate(x, 0.0f, 64);
        fence<HardEvent::V_S>();
        x.GetValue(0);
        b.in.FreeTensor(x);
    };
    cases["local padding that nobody asked for"] = [](Memory& m, bool wrong) {
        Bench b(m);
        auto x = b.in.AllocTensor<float>();
        DataCopyPad(x, b.input, DataCopyExtParams(1, 20, 0, 0, 0), DataCopyPadExtParams<float>(!wrong, 0, 3, 0.0f));
        b.in.EnQue(x);
        x = b.in.DeQue<float>();
        Add(b.work, b.work, x, 8);
        b.in.FreeTensor(x);
    };
    cases["local vector misaligned"] = [](Memory& m, bool wrong) {
        Bench b(m);
        Adds(b.work[wrong ? 4 : 8], b.work[wrong ? 4 : 8], 1.0f, 8);
    };
    cases["local copy misaligned"] = [](Memory& m, bool wrong) {
        Bench b(m);
        auto x = b.in.AllocTensor<float>();
        DataCopy(x[wrong ? 4 : 8], b.input, 8);
        b.in.FreeTensor(x);
    };
    cases["local memory is full"] = [](Memory& m, bool wrong) {
        Bench b(m);
        TBuf<> rest;
        b.pipe.InitBuffer(rest, 192 * 1024 - 4 * 256 + (wrong ? 32 : 0));
    };
    cases["too many buffers"] = [](Memory& m, bool wrong) {
        Bench b(m);
        TQue<TPosition::VECIN, 1> many;
        b.pipe.InitBuffer(many, wrong ? 61 : 60, 32);
    };
    cases["buffer without bytes"] = [](Memory& m, bool wrong) {
        Bench b(m);
        TBuf<> rest;
        b.pipe.InitBuffer(rest, wrong ? 0 : 1);
    };
    cases["longer than the TBuf"] = [](Memory& m, bool wrong) {
        Bench b(m);
        b.calc.Get<float>(wrong ? 65 : 64);
    };
    cases["TBuf without a buffer"] = [](Memory& m, bool wrong) {
        Bench b(m);
        TBuf<> rest;
        if (!wrong) b.pipe.InitBuffer(rest, 32);
        rest.Get<float>();
    };
    cases["local memory of a TPipe that is gone"] = [](Memory& m, bool wrong) {
        Bench b(m);
        fence<HardEvent::V_S>();
        if (wrong) b.pipe.Destroy();
        b.work.GetValue(0);
    };
}

inline void add_queues(Cases& cases) {
    cases["queue without a free buffer"] = [](Memory& m, bool wrong) {
        Bench b(m);
        auto x = b.out.AllocTensor<float>();
        if (!wrong) b.out.FreeTensor(x);
        b.out.FreeTensor(b.out.AllocTensor<float>());
    };
    cases["queue without buffers"] = [](Memory& m, bool wrong) {
        Bench b(m);
        TQue<TPosition::VECIN, 1> other;
        if (!wrong) b.pipe.InitBuffer(other, 1, 32);
        other.FreeTensor(other.AllocTensor<float>());
    };
    cases["queue with buffers twice"] = [](Memory& m, bool wrong) {
        Bench b(m);
        if (wrong) b.pipe.InitBuffer(b.in, 1, 32);
    };
    cases["queue empty"] = [](Memory& m, bool wrong) {
        Bench b(m);
        auto x = b.out.AllocTensor<float>();
        if (!wrong) b.out.EnQue(x);
        b.out.FreeTensor(b.out.DeQue<float>());
    };
    cases["queue full"] = [](Memory& m, bool wrong) {
        Bench b(m);
        TQue<TPosition::VECIN, 1> shallow;
        b.pipe.InitBuffer(shallow, 2, 32);
        auto x = shallow.AllocTensor<float>(), y = shallow.AllocTensor<float>();
        shallow.EnQue(x);
        if (wrong) shallow.EnQue(y);
        shallow.FreeTensor(shallow.DeQue<float>());
        shallow.FreeTensor(y);
    };
    cases["tensor freed twice"] = [](Memory& m, bool wrong) {
        Bench b(m);
        auto x = b.fetched(0);
        b.in.FreeTensor(x);
        if (wrong) b.in.FreeTensor(x);
    };
    cases["tensor never freed"] = [](Memory& m, bool wrong) {
        Bench b(m);
        auto x = b.fetched(0);
        if (!wrong) b.in.FreeTensor(x);
    };
    cases["tensor enqueued twice"] = [](Memory& m, bool wrong) {
        Bench b(m);
        auto x = b.in.AllocTensor<float>();
        b.in.EnQue(x);
        if (wrong) b.in.EnQue(x);
        b.in.FreeTensor(b.in.DeQue<float>());
    };
    cases["tensor of another queue"] = [](Memory& m, bool wrong) {
        Bench b(m);
        auto x = b.in.AllocTensor<float>();
        if (wrong) b.out.EnQue(x);
        b.in.FreeTensor(x);
    };
    cases["tensor freed in its queue"] = [](Memory& m, bool wrong) {
        Bench b(m);
        auto x = b.in.AllocTensor<float>();
        b.in.EnQue(x);
        if (!wrong) x = b.in.DeQue<float>();
        b.in.FreeTensor(x);
    };
    cases["tensor used in its queue"] = [](Memory& m, bool wrong) {
        Bench b(m);
        auto x = b.in.AllocTensor<float>();
        DataCopy(x, b.input, 64);
        b.in.EnQue(x);
        if (!wrong) x = b.in.DeQue<float>();
        Adds(b.work, x, 1.0f, 64);
        b.in.FreeTensor(wrong ? b.in.DeQue<float>() : x);
    };
    cases["tensor used after it was freed"] = [](Memory& m, bool wrong) {
        Bench b(m);
        auto x = b.fetched(0);
        if (wrong) b.in.FreeTensor(x);
        Adds(b.work, x, 1.0f, 64);
        if (!wrong) b.in.FreeTensor(x);
    };
    cases["tensor used while a copy fills it"] = [](Memory& m, bool wrong) {
        Bench b(m);
        auto x = b.in.AllocTensor<float>();
        DataCopy(x, b.input, 64);
        if (!wrong) b.in.EnQue(x), x = b.in.DeQue<float>();
        Adds(b.work, x, 1.0f, 64);
        b.in.FreeTensor(x);
    };
    cases["tensor copied out past its queue"] = [](Memory& m, bool wrong) {
        Bench b(m);
        auto x = b.out.AllocTensor<float>();
        Muls(x, b.work, 2.0f, 64);
        if (!wrong) b.out.EnQue(x), x = b.out.DeQue<float>();
        DataCopy(tensor(m.sums)[GetBlockIdx() * 64], x, 64);
        b.out.FreeTensor(x);
    };
    cases["copy into a tensor that was dequeued"] = [](Memory& m, bool wrong) {
        Bench b(m);
        auto x = b.fetched(0);
        if (!wrong) b.in.FreeTensor(x), x = b.in.AllocTensor<float>();
        DataCopy(x, b.input, 64);
        b.in.FreeTensor(x);
    };
    cases["copy into a tensor that was calculated on"] = [](Memory& m, bool wrong) {
        Bench b(m);
        auto x = b.in.AllocTensor<float>();
        Duplicate(wrong ? x : b.work, 0.0f, 64);
        DataCopy(x, b.input, 32);
        b.in.FreeTensor(x);
    };
    cases["nine tensors at once"] = [](Memory& m, bool wrong) {
        Bench b(m);
        TQue<TPosition::VECIN, 1> many;
        b.pipe.InitBuffer(many, 9, 32);
        LocalTensor<float> x[9];
        for (int i = 0; i < (wrong ? 9 : 8); i++) x[i] = many.AllocTensor<float>();
        for (int i = 0; i < (wrong ? 9 : 8); i++) many.FreeTensor(x[i]);
    };
}

inline void add_events(Cases& cases) {
    cases["flag set twice"] = [](Memory& m, bool wrong) {
        Bench b(m);
        SetFlag<HardEvent::V_MTE3>(EVENT_ID0);
        if (wrong) SetFlag<HardEvent::V_MTE3>(EVENT_ID0);
        WaitFlag<HardEvent::V_MTE3>(EVENT_ID0);
    };
    cases["flag that nobody set"] = [](Memory& m, bool wrong) {
        Bench b(m);
        SetFlag<HardEvent::V_MTE3>(EVENT_ID0);
        WaitFlag<HardEvent::V_MTE3>(EVENT_ID0);
        if (wrong) WaitFlag<HardEvent::V_MTE3>(EVENT_ID0);
    };
    cases["flag that nobody waits for"] = [](Memory& m, bool wrong) {
        Bench b(m);
        SetFlag<HardEvent::S_V>(EVENT_ID1);
        if (!wrong) WaitFlag<HardEvent::S_V>(EVENT_ID1);
    };
    cases["event that does not exist"] = [](Memory& m, bool wrong) {
        Bench b(m);
        SetFlag<HardEvent::S_V>(wrong ? 8 : 7);
        WaitFlag<HardEvent::S_V>(7);
    };
    cases["event never released"] = [](Memory& m, bool wrong) {
        Bench b(m);
        const auto event = b.pipe.AllocEventID<HardEvent::V_S>();
        if (!wrong) b.pipe.ReleaseEventID<HardEvent::V_S>(event);
    };
    cases["event released twice"] = [](Memory& m, bool wrong) {
        Bench b(m);
        const auto event = b.pipe.AllocEventID<HardEvent::V_S>();
        b.pipe.ReleaseEventID<HardEvent::V_S>(event);
        if (wrong) b.pipe.ReleaseEventID<HardEvent::V_S>(event);
    };
    cases["all events reserved"] = [](Memory& m, bool wrong) {
        Bench b(m);
        for (int i = 0; i < 8; i++) b.pipe.AllocEventID<HardEvent::V_S>();
        if (wrong) b.pipe.FetchEventID(HardEvent::V_S);
        for (int8_t i = 0; i < 8; i++) b.pipe.ReleaseEventID<HardEvent::V_S>(i);
    };
}

inline void add_vector(Cases& cases) {
    cases["operands overlap"] = [](Memory& m, bool wrong) {
        Bench b(m);
        Adds(b.work[wrong ? 8 : 16], b.work, 1.0f, 16);
    };
    cases["negative count"] = [](Memory& m, bool wrong) {
        Bench b(m);
        Adds(b.work, b.work, 1.0f, wrong ? -1 : 1);
    };
    cases["comparison of part of a repeat"] = [](Memory& m, bool wrong) {
        Bench b(m);
        auto x = b.in.AllocTensor<uint8_t>();
        CompareScalar(x, b.work, 0.0f, CMPMODE::GT, wrong ? 32 : 64);
        b.in.FreeTensor(x);
    };
    cases["selection in another mode"] = [](Memory& m, bool wrong) {
        Bench b(m);
        auto x = b.in.AllocTensor<uint8_t>();
        CompareScalar(x, b.work, 0.0f, CMPMODE::GT, 64);
        Select(b.work, x, b.work, 0.0f, wrong ? SELMODE::VSEL_TENSOR_TENSOR_MODE : SELMODE::VSEL_TENSOR_SCALAR_MODE, 64);
        b.in.FreeTensor(x);
    };
    for (const std::string mistake : {"gather from between elements", "gather out of bounds"}) {
        cases[mistake] = [mistake](Memory& m, bool wrong) {
            Bench b(m);
            auto offsets = b.in.AllocTensor<uint32_t>();
            Duplicate(offsets, wrong ? (mistake == "gather out of bounds" ? 256u : 2u) : 252u, 8);
            auto x = b.in.AllocTensor<float>();
            Gather(x, b.work, offsets, 0, 8);
            b.in.FreeTensor(x);
            b.in.FreeTensor(offsets);
        };
    }
    cases["cast in a mode that it does not have"] = [](Memory& m, bool wrong) {
        Bench b(m);
        auto x = b.in.AllocTensor<bfloat16_t>();
        Cast(x, b.work, wrong ? RoundMode::CAST_NONE : RoundMode::CAST_RINT, 64);
        b.in.FreeTensor(x);
    };
    cases["sum without enough work space"] = [](Memory& m, bool wrong) {
        Bench b(m);
        auto x = b.in.AllocTensor<float>();
        if (wrong) x.SetSize(4);
        ReduceSum(b.work, b.work, x, 64);
        b.in.FreeTensor(x);
    };
    cases["mask longer than a repeat"] = [](Memory& m, bool wrong) {
        Bench b(m);
        WholeReduceSum(b.work, b.work, wrong ? 65 : 64, 1, 1, 1, 8);
    };
}

}  // namespace guards
