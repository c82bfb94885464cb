// What calls do not take: numbers, modes and types that the device, or the stand-in, has no answer to. See guards.cpp.
#pragma once

#include "guards_matmul.h"

namespace guards {

inline void add_limits_of_copies(Cases& cases) {
    cases["blocks without bytes"] = [](Memory& m, bool wrong) {
        Bench b(m);
        auto x = b.in.AllocTensor<float>();
        DataCopyPad(x, b.input, DataCopyExtParams(1, wrong ? 0 : 4, 0, 0, 0), DataCopyPadExtParams<float>());
        b.in.FreeTensor(x);
    };
    cases["8-byte elements padded with another number"] = [](Memory& m, bool wrong) {
        Bench b(m);
        GlobalTensor<int64_t> from;
        from.SetGlobalBuffer(reinterpret_cast<int64_t*>(m.input), COUNT / 2);
        auto x = b.in.AllocTensor<int64_t>();
        DataCopyPad(x, from, DataCopyExtParams(1, 8, 0, 0, 0), DataCopyPadExtParams<int64_t>(true, 0, 1, wrong ? 1 : 0));
        b.in.FreeTensor(x);
    };
    cases["atomic adding of a type that has none"] = [](Memory& m, bool wrong) {
        Bench b(m);
        GlobalTensor<int64_t> to;
        to.SetGlobalBuffer(reinterpret_cast<int64_t*>(m.sums), COUNT / 2);
        auto x = b.out.AllocTensor<float>();
        Duplicate(x, 1.0f, 64);
        b.out.EnQue(x);
        auto y = b.out.DeQue<int64_t>();
        SetAtomicAdd<float>();
        if (!wrong) SetAtomicNone();
        DataCopy(to[GetBlockIdx() * 32], y, 32);
        SetAtomicNone();
        b.out.FreeTensor(y);
    };
}

inline void add_limits_of_the_vector_unit(Cases& cases) {
    cases["sum of no elements"] = [](Memory& m, bool wrong) {
        Bench b(m);
        auto x = b.in.AllocTensor<float>();
        ReduceSum(b.work, b.work, x, wrong ? 0 : 64);
        b.in.FreeTensor(x);
    };
    cases["largest of no elements"] = [](Memory& m, bool wrong) {
        Bench b(m);
        auto x = b.in.AllocTensor<float>();
        ReduceMax(b.work, b.work, x, wrong ? 0 : 64);
        b.in.FreeTensor(x);
    };
    cases["least element's index"] = [](Memory& m, bool wrong) {
        Bench b(m);
        auto x = b.in.AllocTensor<float>();
        ReduceMin(b.work, b.work, x, 64, wrong);
        b.in.FreeTensor(x);
    };
    cases["blocks summed in too many repeats"] = [](Memory& m, bool wrong) {
        Bench b(m);
        BlockReduceSum(b.work, b.work, wrong ? 256 : 1, 64, 1, 1, 8);
    };
    cases["mask without elements"] = [](Memory& m, bool wrong) {
        Bench b(m);
        BlockReduceSum(b.work, b.work, 1, wrong ? 0 : 64, 1, 1, 8);
    };
    cases["repeats summed in too many repeats"] = [](Memory& m, bool wrong) {
        Bench b(m);
        WholeReduceSum(b.work, b.work, 64, wrong ? 256 : 1, 1, 1, 8);
    };
    cases["whole numbers compared by size"] = [](Memory& m, bool wrong) {
        Bench b(m);
        auto x = b.in.AllocTensor<uint8_t>();
        CompareScalar(x, b.work.ReinterpretCast<int32_t>(), 0, wrong ? CMPMODE::GT : CMPMODE::EQ, 64);
        b.in.FreeTensor(x);
    };
    cases["selection of tensors in a mode of scalars"] = [](Memory& m, bool wrong) {
        Bench b(m);
        auto x = b.in.AllocTensor<uint8_t>();
        CompareScalar(x, b.work, 0.0f, CMPMODE::GT, 64);
        Select(b.work, x, b.work, b.work, wrong ? SELMODE::VSEL_TENSOR_SCALAR_MODE : SELMODE::VSEL_TENSOR_TENSOR_MODE, 64);
        b.in.FreeTensor(x);
    };
}

inline void add_limits_of_products(Cases& cases) {
    cases["product of shapes that are not positive"] = [](Memory& m, bool wrong) {
        Products p(m);
        p.prepare();
        p.product.SetOrgShape(8, 8, 8, wrong ? 0 : 8);
    };
    cases["product without elements"] = [](Memory& m, bool wrong) {
        Products p(m);
        p.prepare();
        p.product.SetTail(wrong ? 0 : 1);
    };
    cases["second operand transposed against its type"] = [](Memory& m, bool wrong) {
        Products p(m);
        Matmul<Products::Matrix, Products::Matrix, Products::Matrix> product;
        REGIST_MATMUL_OBJ(&p.bench.pipe, GetSysWorkSpacePtr(), product, &p.tiling);
        product.SetTensorB(p.input, wrong);
    };
    cases["product that is not written in place"] = [](Memory& m, bool wrong) {
        Products p(m);
        p.prepare();
        p.product.IterateAll(p.result, 0, wrong);
    };
    cases["operand whose rows do not fit"] = [](Memory& m, bool wrong) {
        Products p(m);
        p.prepare();
        p.product.SetOrgShape(8, 8, wrong ? 7 : 8, 8);
        p.product.IterateAll(p.result);
    };
}

}  // namespace guards
