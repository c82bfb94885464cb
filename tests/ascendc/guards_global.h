// Mistakes with global memory, copies, barriers, and between cores. See guards.cpp.
#pragma once

#include "guards_local.h"

namespace guards {

inline void copy_out(Bench& b, const GlobalTensor<float>& to, int32_t count) {
    auto x = b.out.AllocTensor<float>();
    Duplicate(x, 1.0f, count);
    b.out.EnQue(x);
    x = b.out.DeQue<float>();
    DataCopy(to, x, static_cast<uint32_t>(count));
    b.out.FreeTensor(x);
}

inline void add_global(Cases& cases) {
    cases["global copy out of bounds"] = [](Memory& m, bool wrong) {
        Bench b(m);
        b.in.FreeTensor(b.fetched(wrong ? COUNT - 56 : COUNT - 64));
    };
    cases["global scalar out of bounds"] = [](Memory& m, bool wrong) {
        Bench b(m);
        b.input.GetValue(wrong ? COUNT : COUNT - 1);
    };
    cases["global before the beginning"] = [](Memory& m, bool wrong) {
        Bench b(m);
        b.input[64].GetValue(wrong ? static_cast<uint64_t>(-65) : 0);
    };
    cases["global beyond what was registered"] = [](Memory& m, bool wrong) {
        Bench b(m);
        tensor(m.input, COUNT + 1).GetValue(wrong ? COUNT : COUNT - 1);
    };
    cases["global that was not registered"] = [](Memory& m, bool wrong) {
        Bench b(m);
        float other[8] = {};
        tensor(wrong ? other : m.input, 8).GetValue(0);
    };
    cases["global without a buffer"] = [](Memory& m, bool wrong) {
        Bench b(m);
        (wrong ? GlobalTensor<float>() : b.input).GetValue(0);
    };
    cases["global never written"] = [](Memory& m, bool wrong) {
        Bench b(m);
        const auto mine = tensor(reinterpret_cast<float*>(m.workspace.data()))[GetBlockIdx() * 64];
        if (!wrong) copy_out(b, mine, 64);
        PipeBarrier<PIPE_ALL>();
        auto x = b.in.AllocTensor<float>();
        DataCopy(x, mine, 64);
        b.in.FreeTensor(x);
    };
    cases["global not aligned to its elements"] = [](Memory& m, bool wrong) {
        Bench b(m);
        tensor(reinterpret_cast<float*>(reinterpret_cast<uint8_t*>(m.input) + (wrong ? 2 : 4)), 8).GetValue(0);
    };
    cases["output left as it was"] = [](Memory& m, bool wrong) {
        if (wrong && GetBlockIdx() == 1) return;
        Bench b(m);
    };
    cases["copy of no multiple of 32 bytes"] = [](Memory& m, bool wrong) {
        Bench b(m);
        auto x = b.in.AllocTensor<float>();
        DataCopy(x, b.input, wrong ? 12 : 16);
        b.in.FreeTensor(x);
    };
    cases["copy of nothing"] = [](Memory& m, bool wrong) {
        Bench b(m);
        copy_out(b, tensor(m.sums)[GetBlockIdx() * 64], wrong ? 0 : 64);
    };
    cases["too many blocks"] = [](Memory& m, bool wrong) {
        Bench b(m);
        auto x = b.in.AllocTensor<float>();
        DataCopyPad(x, b.input, DataCopyExtParams(wrong ? 4096 : 1, 4, 0, 0, 0), DataCopyPadExtParams<float>());
        b.in.FreeTensor(x);
    };
    cases["block of half an element"] = [](Memory& m, bool wrong) {
        Bench b(m);
        auto x = b.in.AllocTensor<float>();
        DataCopyPad(x, b.input, DataCopyExtParams(1, wrong ? 6 : 8, 0, 0, 0), DataCopyPadExtParams<float>());
        b.in.FreeTensor(x);
    };
    cases["too much padding"] = [](Memory& m, bool wrong) {
        Bench b(m);
        auto x = b.in.AllocTensor<float>();
        DataCopyPad(x, b.input, DataCopyExtParams(1, 4, 0, 0, 0), DataCopyPadExtParams<float>(true, wrong ? 9 : 8, 0, 0.0f));
        b.in.FreeTensor(x);
    };
    cases["atomic mode left on"] = [](Memory& m, bool wrong) {
        Bench b(m);
        SetAtomicAdd<float>();
        copy_out(b, tensor(m.sums), 64);
        if (!wrong) SetAtomicNone();
    };
    cases["atomic mode of another type"] = [](Memory& m, bool wrong) {
        Bench b(m);
        wrong ? SetAtomicAdd<half>() : SetAtomicAdd<float>();
        copy_out(b, tensor(m.sums), 64);
        SetAtomicNone();
    };
}

inline void add_launches(Cases& cases) {
    cases["core leaves while another waits"] = [](Memory& m, bool wrong) {
        Bench b(m);
        if (!wrong || GetBlockIdx() == 0) SyncAll();
    };
    cases["two cores write the same"] = [](Memory& m, bool wrong) {
        Bench b(m);
        copy_out(b, tensor(m.sums)[wrong ? 0 : GetBlockIdx() * 64], 64);
    };
    cases["one core reads what another writes"] = [](Memory& m, bool wrong) {
        Bench b(m);
        if (GetBlockIdx() == 0) copy_out(b, tensor(m.sums), 64);
        if (!wrong) SyncAll();
        if (GetBlockIdx() == 1) tensor(m.sums).GetValue(8);
    };
    cases["one core reads what another adds to"] = [](Memory& m, bool wrong) {
        Bench b(m);
        SetAtomicAdd<float>();
        if (GetBlockIdx() == 0) copy_out(b, tensor(m.sums), 64);
        SetAtomicNone();
        if (!wrong) SyncAll();
        if (GetBlockIdx() == 1) tensor(m.sums).GetValue(8);
    };
    cases["one core writes what another adds to"] = [](Memory& m, bool wrong) {
        Bench b(m);
        SetAtomicAdd<float>();
        if (GetBlockIdx() == 0) copy_out(b, tensor(m.sums), 64);
        SetAtomicNone();
        if (!wrong) SyncAll();
        if (GetBlockIdx() == 1) copy_out(b, tensor(m.sums), 8);
    };
    cases["kernel that stops itself"] = [](Memory& m, bool wrong) {
        Bench b(m);
        if (wrong) Trap();
    };
}

}  // namespace guards
