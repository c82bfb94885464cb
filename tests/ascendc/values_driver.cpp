// Calls of the stand-in's vector and cube unit on given numbers, for test_stand_in_values.py and test_extremes.py.

#include <functional>
#include <map>
#include <string>

#include "common/strips.h"
#include "host/driver.h"
#include "kernel_operator.h"
#include "lib/matmul_intf.h"

using namespace AscendC;
using turbogr::ascend::fence;

namespace {

template <class T>
using Operation =
    std::function<void(const LocalTensor<T>& out, const LocalTensor<T>& x, const LocalTensor<T>& y, int32_t count)>;

template <class T>
std::map<std::string, Operation<T>> operations() {
    const T s = static_cast<T>(0.75f);
    std::map<std::string, Operation<T>> all;
    using X = const LocalTensor<T>&;
    all["Add"] = [](X o, X x, X y, int32_t n) { Add(o, x, y, n); };
    all["Sub"] = [](X o, X x, X y, int32_t n) { Sub(o, x, y, n); };
    all["Mul"] = [](X o, X x, X y, int32_t n) { Mul(o, x, y, n); };
    all["Div"] = [](X o, X x, X y, int32_t n) { Div(o, x, y, n); };
    all["Max"] = [](X o, X x, X y, int32_t n) { Max(o, x, y, n); };
    all["Min"] = [](X o, X x, X y, int32_t n) { Min(o, x, y, n); };
    all["Adds"] = [s](X o, X x, X, int32_t n) { Adds(o, x, s, n); };
    all["Muls"] = [s](X o, X x, X, int32_t n) { Muls(o, x, s, n); };
    all["Maxs"] = [s](X o, X x, X, int32_t n) { Maxs(o, x, s, n); };
    all["Mins"] = [s](X o, X x, X, int32_t n) { Mins(o, x, s, n); };
    all["Exp"] = [](X o, X x, X, int32_t n) { Exp(o, x, n); };
    all["Ln"] = [](X o, X x, X, int32_t n) { Ln(o, x, n); };
    all["Sqrt"] = [](X o, X x, X, int32_t n) { Sqrt(o, x, n); };
    all["Rsqrt"] = [](X o, X x, X, int32_t n) { Rsqrt(o, x, n); };
    all["Reciprocal"] = [](X o, X x, X, int32_t n) { Reciprocal(o, x, n); };
    all["Abs"] = [](X o, X x, X, int32_t n) { Abs(o, x, n); };
    all["Relu"] = [](X o, X x, X, int32_t n) { Relu(o, x, n); };
    all["Silu"] = [](X o, X x, X, int32_t n) { Silu(o, x, n); };
    all["Sigmoid"] = [](X o, X x, X, int32_t n) { Sigmoid(o, x, n); };
    all["Power"] = [](X o, X x, X y, int32_t n) { Power(o, x, y, n); };
    all["Power of a scalar"] = [s](X o, X x, X, int32_t n) { Power(o, x, s, n); };
    all["Duplicate"] = [s](X o, X, X, int32_t n) { Duplicate(o, s, n); };
    all["CreateVecIndex"] = [](X o, X, X, int32_t n) { CreateVecIndex(o, static_cast<T>(3), static_cast<uint32_t>(n)); };
    all["ArithProgression"] = [s](X o, X, X, int32_t n) { ArithProgression(o, static_cast<T>(3), s, n); };
    all["Axpy"] = [s](X o, X x, X y, int32_t n) { DataCopy(o, y, n), Axpy(o, x, s, n); };
    all["MulAddDst"] = [](X o, X x, X y, int32_t n) { DataCopy(o, y, n), MulAddDst(o, x, y, n); };
    return all;
}

// Local memory for one operation.
template <class T>
struct Unit {
    explicit Unit(int64_t count) {
        for (TBuf<>* buffer : {&first, &second, &third}) pipe.InitBuffer(*buffer, static_cast<uint32_t>(count * 8 + 256));
    }
    template <class U>
    static LocalTensor<U> fetched(TBuf<>& to, U* from, int64_t count) {
        GlobalTensor<U> global;
        global.SetGlobalBuffer(from, static_cast<uint64_t>(count));
        auto local = to.Get<U>();
        DataCopyPad(local, global, DataCopyExtParams(1, static_cast<uint32_t>(count * sizeof(U)), 0, 0, 0),
                    DataCopyPadExtParams<U>());
        PipeBarrier<PIPE_ALL>();
        return local;
    }
    template <class U>
    static void store(U* to, const LocalTensor<U>& from, int64_t count) {
        GlobalTensor<U> global;
        global.SetGlobalBuffer(to, static_cast<uint64_t>(count));
        PipeBarrier<PIPE_ALL>();
        DataCopyPad(global, from, DataCopyExtParams(1, static_cast<uint32_t>(count * sizeof(U)), 0, 0, 0));
    }

    TPipe pipe;
    TBuf<> first, second, third;
};

template <class T>
host::Counters calculated(const char* name, T* x, T* y, T* out, int64_t count) {
    const int64_t bytes = count * static_cast<int64_t>(sizeof(T));
    const auto a = host::global(x, bytes), b = host::global(y, bytes), c = host::unwritten(out, bytes);
    const auto operation = operations<T>().at(name);
    return host::launch(1, [&] {
        Unit<T> unit(count);
        const auto result = unit.third.template Get<T>();
        operation(result, unit.fetched(unit.first, x, count), unit.fetched(unit.second, y, count), static_cast<int32_t>(count));
        unit.store(out, result, count);
    });
}

template <class U, class T>
host::Counters cast(T* x, U* out, int64_t count, int64_t mode) {
    const auto a = host::global(x, count * static_cast<int64_t>(sizeof(T)));
    const auto b = host::unwritten(out, count * static_cast<int64_t>(sizeof(U)));
    return host::launch(1, [&] {
        Unit<T> unit(count);
        const auto result = unit.third.template Get<U>();
        Cast(result, unit.fetched(unit.first, x, count), static_cast<RoundMode>(mode), static_cast<uint32_t>(count));
        unit.store(out, result, count);
    });
}

template <class T>
using Multiplied = MatmulType<TPosition::GM, CubeFormat::ND, T, true>;

template <class T>
host::Counters product(const int64_t* mnk, T* a, T* b, float* c, bool transposed_a, bool transposed_b, bool add) {
    const auto m = static_cast<int>(mnk[0]), n = static_cast<int>(mnk[1]), k = static_cast<int>(mnk[2]);
    const auto x = host::global(a, mnk[0] * mnk[2] * static_cast<int64_t>(sizeof(T)));
    const auto y = host::global(b, mnk[1] * mnk[2] * static_cast<int64_t>(sizeof(T)));
    const auto z = host::global(c, mnk[0] * mnk[1] * 4);
    return host::launch(1, [&] {
        TPipe pipe;
        TCubeTiling tiling;
        tiling.M = tiling.singleCoreM = m;
        tiling.N = tiling.singleCoreN = n;
        tiling.Ka = tiling.Kb = tiling.singleCoreK = k;
        Matmul<Multiplied<T>, Multiplied<T>, MatmulType<TPosition::GM, CubeFormat::ND, float>> matmul;
        REGIST_MATMUL_OBJ(&pipe, GetSysWorkSpacePtr(), matmul, &tiling);
        GlobalTensor<T> left, right;
        GlobalTensor<float> result;
        left.SetGlobalBuffer(a);
        right.SetGlobalBuffer(b);
        result.SetGlobalBuffer(c);
        matmul.SetTensorA(left, transposed_a);
        matmul.SetTensorB(right, transposed_b);
        matmul.IterateAll(result, add);
    });
}

}  // namespace

extern "C" {

void calculate_float(const char* name, float* x, float* y, float* out, int64_t count, host::Outcome* outcome) {
    host::report(outcome, [&] { return calculated(name, x, y, out, count); });
}
void calculate_half(const char* name, half* x, half* y, half* out, int64_t count, host::Outcome* outcome) {
    host::report(outcome, [&] { return calculated(name, x, y, out, count); });
}

void cast_to(const char* to, float* x, void* out, int64_t count, int64_t mode, host::Outcome* outcome) {
    host::report(outcome, [&] {
        const std::string type = to;
        if (type == "half") return cast(x, static_cast<half*>(out), count, mode);
        if (type == "bfloat16") return cast(x, static_cast<bfloat16_t*>(out), count, mode);
        if (type == "int32") return cast(x, static_cast<int32_t*>(out), count, mode);
        return cast(x, static_cast<float*>(out), count, mode);
    });
}
void cast_from(const char* from, void* x, float* out, int64_t count, int64_t mode, host::Outcome* outcome) {
    host::report(outcome, [&] {
        const std::string type = from;
        if (type == "half") return cast(static_cast<half*>(x), out, count, mode);
        if (type == "bfloat16") return cast(static_cast<bfloat16_t*>(x), out, count, mode);
        if (type == "int64") return cast(static_cast<int64_t*>(x), out, count, mode);
        return cast(static_cast<int32_t*>(x), out, count, mode);
    });
}

// 128 numbers: their sum, sums of each 8, sums of each 64, whether x > y, x or y by that, x backwards, the first 8 in blocks.
void select_and_sum(float* x, float* y, float* out, host::Outcome* outcome) {
    host::report(outcome, [&] {
        constexpr int64_t N = 128;
        const auto a = host::global(x, 4 * N), b = host::global(y, 4 * N), c = host::unwritten(out, 4 * 8 * N);
        return host::launch(1, [&] {
            Unit<float> unit(N);
            const auto first = unit.fetched(unit.first, x, N), second = unit.fetched(unit.second, y, N);
            TBuf<> bits, result, offsets;
            unit.pipe.InitBuffer(bits, 32);
            unit.pipe.InitBuffer(result, 4 * 8 * N);
            unit.pipe.InitBuffer(offsets, 4 * N);
            const auto r = result.Get<float>();
            Duplicate(r, 0.0f, 8 * N);
            ReduceSum(r, first, unit.third.Get<float>(), N);
            BlockReduceSum(r[N], first, 2, 64, 1, 1, 8);
            WholeReduceSum(r[2 * N], first, 64, 2, 1, 1, 8);
            const auto larger = bits.Get<uint8_t>();
            Compare(larger, first, second, CMPMODE::GT, N);
            Select(r[3 * N], larger, first, second, SELMODE::VSEL_TENSOR_TENSOR_MODE, N);
            Select(r[4 * N], larger, first, -1.0f, SELMODE::VSEL_TENSOR_SCALAR_MODE, N);
            const auto order = offsets.Get<int32_t>();
            ArithProgression<int32_t>(order, 4 * (N - 1), -4, N);
            Gather(r[5 * N], first, order.ReinterpretCast<uint32_t>(), 0, N);
            Brcb(r[6 * N], first, 1, BrcbRepeatParams(1, 8));
            CompareScalar(larger, first, 0.0f, CMPMODE::LE, N);
            Select(r[7 * N], larger, first, 0.0f, SELMODE::VSEL_TENSOR_SCALAR_MODE, N);
            unit.store(out, r, 8 * N);
        });
    });
}

void multiply_float(const int64_t* mnk, float* a, float* b, float* c, int64_t ta, int64_t tb, int64_t add,
                    host::Outcome* outcome) {
    host::report(outcome, [&] { return product(mnk, a, b, c, ta != 0, tb != 0, add != 0); });
}
void multiply_half(const int64_t* mnk, half* a, half* b, float* c, int64_t ta, int64_t tb, int64_t add,
                   host::Outcome* outcome) {
    host::report(outcome, [&] { return product(mnk, a, b, c, ta != 0, tb != 0, add != 0); });
}

}  // extern "C"

// ReduceMax and ReduceMin. x [count] and to [2]: the largest and the least. mistake: 1 asks for no elements, 2 for an index, 3 reads
// the work space.
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
