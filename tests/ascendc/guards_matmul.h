// Mistakes with products of matrices. See guards.cpp.
#pragma once

#include "guards_global.h"
#include "lib/matmul_intf.h"

namespace guards {

// C [8, 8] = A [8, 8] B [8, 8], each core in sums of its own.
struct Products {
    using Matrix = MatmulType<TPosition::GM, CubeFormat::ND, float>;
    using Transposable = MatmulType<TPosition::GM, CubeFormat::ND, float, true>;

    explicit Products(Memory& memory)
        : bench(memory), input(tensor(memory.input)), result(tensor(memory.sums)[GetBlockIdx() * 128]) {
        tiling.M = tiling.N = tiling.Ka = tiling.Kb = tiling.singleCoreM = tiling.singleCoreN = tiling.singleCoreK = 8;
    }
    void prepare() {
        REGIST_MATMUL_OBJ(&bench.pipe, GetSysWorkSpacePtr(), product, &tiling);
        product.SetTensorA(input);
        product.SetTensorB(input[64]);
    }

    Bench bench;
    TCubeTiling tiling;
    GlobalTensor<float> input, result;
    Matmul<Matrix, Transposable, Matrix> product;
};

inline void add_matmul(Cases& cases) {
    cases["product without Init"] = [](Memory& m, bool wrong) {
        Products p(m);
        if (!wrong) p.prepare();
        p.product.IterateAll(p.result);
        p.product.End();
    };
    cases["product without an operand"] = [](Memory& m, bool wrong) {
        Products p(m);
        p.product.Init(&p.tiling);
        p.product.SetTensorA(p.input);
        if (!wrong) p.product.SetTensorB(p.input);
        p.product.IterateAll(p.result);
    };
    cases["product with an empty tiling"] = [](Memory& m, bool wrong) {
        Products p(m);
        if (wrong) p.tiling.singleCoreK = 0;
        p.prepare();
    };
    cases["product transposed against its type"] = [](Memory& m, bool wrong) {
        Products p(m);
        p.prepare();
        wrong ? p.product.SetTensorA(p.input, true) : p.product.SetTensorB(p.input, true);
    };
    cases["product larger than its tiling"] = [](Memory& m, bool wrong) {
        Products p(m);
        p.prepare();
        p.product.SetSingleShape(wrong ? 9 : 7, 8, 8);
    };
    cases["product whose rows do not fit"] = [](Memory& m, bool wrong) {
        Products p(m);
        p.prepare();
        p.product.SetOrgShape(8, 8, 8, 8, wrong ? 7 : 8);
        p.product.IterateAll(p.result);
    };
    cases["product out of bounds"] = [](Memory& m, bool wrong) {
        Products p(m);
        p.prepare();
        p.product.SetTensorA(p.input[COUNT - (wrong ? 63 : 64)]);
        p.product.IterateAll(p.result);
    };
    cases["product in atomic mode"] = [](Memory& m, bool wrong) {
        Products p(m);
        p.prepare();
        p.product.IterateAll(p.result, wrong ? 2 : 1);
    };
    cases["result read before it is there"] = [](Memory& m, bool wrong) {
        Products p(m);
        p.prepare();
        p.product.IterateAll<false>(p.result, 0, false, true);
        if (!wrong) p.product.WaitIterateAll();
        p.result.GetValue(63);
        if (wrong) p.product.WaitIterateAll();
    };
    cases["operand overwritten before it was read"] = [](Memory& m, bool wrong) {
        Products p(m);
        const auto operand = tensor(m.sums)[GetBlockIdx() * 128 + 64];
        p.prepare();
        p.product.SetTensorA(operand);
        p.product.IterateAll<false>(p.result, 0, false, true);
        if (!wrong) p.product.WaitIterateAll();
        copy_out(p.bench, operand, 8);
        if (wrong) p.product.WaitIterateAll();
    };
    cases["product posted while one is waited for"] = [](Memory& m, bool wrong) {
        Products p(m);
        p.prepare();
        p.product.IterateAll<false>(p.result, 0, false, wrong);
        p.product.IterateAll<false>(p.result, 1, false, true);
        p.product.WaitIterateAll();
    };
    cases["product that nobody waits for"] = [](Memory& m, bool wrong) {
        Products p(m);
        p.prepare();
        p.product.IterateAll<false>(p.result, 0, false, !wrong);
        if (!wrong) p.product.WaitIterateAll();
    };
    cases["wait for no product"] = [](Memory& m, bool wrong) {
        Products p(m);
        p.prepare();
        wrong ? p.product.WaitIterateAll() : p.product.IterateAll(p.result);
    };
    cases["end of a product that is not there"] = [](Memory& m, bool wrong) {
        Products p(m);
        p.prepare();
        p.product.IterateAll<false>(p.result, 0, false, true);
        if (wrong) p.product.End();
        p.product.WaitIterateAll();
    };
}

}  // namespace guards
