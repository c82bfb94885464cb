// Waits between pipes that are missing. See guards.cpp.
#pragma once

#include "guards_matmul.h"

namespace guards {

inline void add_pipes(Cases& cases) {
    cases["scalar reads what the vector unit writes"] = [](Memory& m, bool wrong) {
        Bench b(m);
        if (!wrong) fence<HardEvent::V_S>();
        b.work.GetValue(0);
    };
    cases["scalar writes what the vector unit reads"] = [](Memory& m, bool wrong) {
        Bench b(m);
        TBuf<> other;
        b.pipe.InitBuffer(other, 256);
        fence<HardEvent::V_S>();
        Adds(other.Get<float>(), b.work, 1.0f, 64);
        if (!wrong) fence<HardEvent::V_S>();
        b.work.SetValue(0, 0.0f);
    };
    cases["vector reads what the scalar unit writes"] = [](Memory& m, bool wrong) {
        Bench b(m);
        fence<HardEvent::V_S>();
        b.work.SetValue(0, 0.0f);
        if (!wrong) fence<HardEvent::S_V>();
        Adds(b.work, b.work, 1.0f, 64);
    };
    cases["vector reads what is copied in"] = [](Memory& m, bool wrong) {
        Bench b(m);
        fence<HardEvent::V_MTE2>();
        DataCopy(b.work, b.input, 64);
        if (!wrong) fence<HardEvent::MTE2_V>();
        Adds(b.work, b.work, 1.0f, 64);
    };
    cases["copied into what the vector unit reads"] = [](Memory& m, bool wrong) {
        Bench b(m);
        auto x = b.out.AllocTensor<float>();
        fence<HardEvent::V_MTE2>();
        Adds(x, b.work, 1.0f, 64);
        if (!wrong) fence<HardEvent::V_MTE2>();
        DataCopy(b.work, b.input, 64);
        b.out.FreeTensor(x);
    };
    cases["copied out while the vector unit writes"] = [](Memory& m, bool wrong) {
        Bench b(m);
        Adds(b.work, b.work, 1.0f, 64);
        if (!wrong) fence<HardEvent::V_MTE3>();
        DataCopy(tensor(m.sums)[GetBlockIdx() * 64], b.work, 64);
    };
    cases["vector writes what is copied out"] = [](Memory& m, bool wrong) {
        Bench b(m);
        fence<HardEvent::V_MTE3>();
        DataCopy(tensor(m.sums)[GetBlockIdx() * 64], b.work, 64);
        if (!wrong) fence<HardEvent::MTE3_V>();
        Duplicate(b.work, 0.0f, 8);
    };
    cases["copied in what is copied out"] = [](Memory& m, bool wrong) {
        Bench b(m);
        const auto mine = tensor(m.sums)[GetBlockIdx() * 64];
        copy_out(b, mine, 64);
        if (!wrong) fence<HardEvent::MTE3_MTE2>();
        auto x = b.in.AllocTensor<float>();
        DataCopy(x, mine, 8);
        b.in.FreeTensor(x);
    };
    cases["copied out twice to one place"] = [](Memory& m, bool wrong) {
        Bench b(m);
        const auto mine = tensor(m.sums)[GetBlockIdx() * 64];
        fence<HardEvent::V_MTE3>();
        DataCopy(mine, b.work, 64);
        if (!wrong) PipeBarrier<PIPE_MTE3>();
        DataCopy(mine[8], b.work, 8);
    };
    cases["added to what is copied out"] = [](Memory& m, bool wrong) {
        Bench b(m);
        const auto mine = tensor(m.sums)[GetBlockIdx() * 64];
        fence<HardEvent::V_MTE3>();
        DataCopy(mine, b.work, 64);
        SetAtomicAdd<float>();
        if (!wrong) PipeBarrier<PIPE_ALL>();
        DataCopy(mine[8], b.work, 8);
        DataCopy(mine[8], b.work, 8);  // sums may come in any order
        SetAtomicNone();
    };
    cases["waits of another kind"] = [](Memory& m, bool wrong) {
        Bench b(m);
        fence<HardEvent::V_MTE2>();
        DataCopy(b.work, b.input, 64);
        wrong ? fence<HardEvent::MTE2_MTE3>() : fence<HardEvent::MTE2_S>();  // what S waits for comes before all it issues
        Adds(b.work, b.work, 1.0f, 64);
    };
    cases["product of what is copied out"] = [](Memory& m, bool wrong) {
        Products p(m);
        p.prepare();
        const auto operand = tensor(m.sums)[GetBlockIdx() * 128 + 64];
        copy_out(p.bench, operand, 64);
        if (!wrong) fence<HardEvent::MTE3_S>();
        p.product.SetTensorA(operand);
        p.product.IterateAll(p.result);
    };
    cases["product onto what is copied in"] = [](Memory& m, bool wrong) {
        Products p(m);
        p.prepare();
        auto x = p.bench.in.AllocTensor<float>();
        DataCopy(x, p.result, 64);
        p.bench.in.EnQue(x);
        x = p.bench.in.DeQue<float>();
        if (!wrong) fence<HardEvent::MTE2_S>();
        p.product.IterateAll(p.result);
        p.bench.in.FreeTensor(x);
    };
}

// The scalar unit's cache, which nothing else looks into.
inline void add_caches(Cases& cases) {
    const auto clean = [](const GlobalTensor<float>& x) { DataCacheCleanAndInvalid<float, CacheLine::ENTIRE_DATA_CACHE>(x); };
    cases["write left in the cache"] = [clean](Memory& m, bool wrong) {
        Bench b(m);
        const auto mine = tensor(m.sums)[GetBlockIdx() * 64];
        mine.SetValue(0, 1.0f);
        if (!wrong) clean(mine);
    };
    cases["write in the cache at a barrier"] = [clean](Memory& m, bool wrong) {
        Bench b(m);
        const auto mine = tensor(m.sums)[GetBlockIdx() * 64];
        mine.SetValue(0, 1.0f);
        if (!wrong) clean(mine);
        SyncAll();
        clean(mine);
    };
    cases["copy of what is in the cache"] = [clean](Memory& m, bool wrong) {
        Bench b(m);
        const auto mine = tensor(m.sums)[GetBlockIdx() * 64];
        mine.SetValue(0, 1.0f);
        fence<HardEvent::S_MTE2>();
        if (!wrong) clean(mine);
        auto x = b.in.AllocTensor<float>();
        DataCopy(x, mine, 8);
        b.in.FreeTensor(x);
        clean(mine);
    };
    cases["cache older than a copy"] = [](Memory& m, bool wrong) {
        Bench b(m);
        const auto mine = tensor(m.sums)[GetBlockIdx() * 64];
        mine.GetValue(0);
        copy_out(b, mine, 8);
        fence<HardEvent::MTE3_S>();
        if (!wrong) DataCacheCleanAndInvalid<float, CacheLine::SINGLE_CACHE_LINE>(mine);
        mine.GetValue(1);
    };
    cases["cache older than another core's write"] = [clean](Memory& m, bool wrong) {
        Bench b(m);
        const auto all = tensor(m.sums);
        if (GetBlockIdx() == 0) all.GetValue(0);
        SyncAll();
        if (GetBlockIdx() == 1) copy_out(b, all, 8);
        SyncAll();
        if (!wrong) clean(all);
        if (GetBlockIdx() == 0) all.GetValue(1);
    };
    cases["two cores write one line"] = [clean](Memory& m, bool wrong) {
        Bench b(m);
        const auto mine = tensor(m.sums)[GetBlockIdx() * (wrong ? 8 : 16)];
        mine.SetValue(0, 1.0f);
        clean(mine);
    };
}

}  // namespace guards
