// Calls of the vector unit that do more than one element after the other: sums, comparisons, choices, gathering, broadcasting.
#pragma once

#include <cstdint>
#include <vector>

#include "vector.h"

namespace AscendC {

enum class CMPMODE : uint8_t { LT = 0, GT, EQ, LE, GE, NE };
enum class SELMODE : uint8_t { VSEL_CMPMASK_SPR = 0, VSEL_TENSOR_SCALAR_MODE, VSEL_TENSOR_TENSOR_MODE };

struct BrcbRepeatParams {
    uint16_t dstBlkStride = 1, dstRepStride = 8;
    BrcbRepeatParams() = default;
    BrcbRepeatParams(uint16_t block, uint16_t repeat) : dstBlkStride(block), dstRepStride(repeat) {}
};

}  // namespace AscendC

namespace host {

inline constexpr int64_t REPEAT_BYTES = 256;  // what the vector unit does at once

template <class T>
inline constexpr int64_t BLOCK = BLOCK_BYTES / static_cast<int64_t>(sizeof(T));
template <class T>
inline constexpr int64_t REPEAT = REPEAT_BYTES / static_cast<int64_t>(sizeof(T));

// The sum in pairs, as a tree of adders does it.
template <class T>
float tree_sum(const T* x, int64_t count) {
    if (count == 0) return 0;
    if (count == 1) return static_cast<float>(x[0]);
    const int64_t first = count / 2;
    return tree_sum(x, first) + tree_sum(x + first, count - first);
}

template <class T>
bool compared(T x, T y, AscendC::CMPMODE mode) {
    switch (mode) {
        case AscendC::CMPMODE::LT: return x < y;
        case AscendC::CMPMODE::GT: return x > y;
        case AscendC::CMPMODE::EQ: return x == y;
        case AscendC::CMPMODE::LE: return x <= y;
        case AscendC::CMPMODE::GE: return x >= y;
        default: return x != y;
    }
}

// Bit i of `dst` is f(i).
template <class F>
void write_bits(const AscendC::LocalTensor<uint8_t>& dst, int64_t count, F f) {
    uint8_t* to = dst.write(Unit::Vector, 0, (count + 7) / 8);
    std::fill_n(to, (count + 7) / 8, 0);
    for (int64_t i = 0; i < count; i++) to[i / 8] = static_cast<uint8_t>(to[i / 8] | f(i) << i % 8);
}

template <class T>
void check_repeats(int64_t count) {
    require(count * static_cast<int64_t>(sizeof(T)) % REPEAT_BYTES == 0, "compares ", count,
            " elements: they must fill multiples of ", REPEAT_BYTES, " bytes");
}

inline void check_mask(int64_t mask, int64_t most) {
    require(mask >= 1 && mask <= most, "a mask of ", mask, " elements: there may be 1 to ", most);
}

}  // namespace host

namespace AscendC {

// dst[0] = sum of src. `work` must be as long as the device needs it.
template <host::Floating T>
void ReduceSum(const LocalTensor<T>& dst, const LocalTensor<T>& src, const LocalTensor<T>& work, const int32_t count,
               HOST_PLACE) {
    host::enter_vector("ReduceSum", &host::Counters::vector_reductions, count, place);
    host::require(count >= 1, "no elements");
    const float sum = host::tree_sum(src.read(host::Unit::Vector, 0, count), count);
    const int64_t repeats = (count + host::REPEAT<T> - 1) / host::REPEAT<T>;
    work.write(host::Unit::Vector, 0, host::rounded_up(repeats, host::BLOCK<T>));
    work.spoil(0, host::rounded_up(repeats, host::BLOCK<T>) * static_cast<int64_t>(sizeof(T)));
    *dst.write(host::Unit::Vector, 0, 1) = T(sum);
}

// dst[0] = the largest or the least of src; dst[1], for an index that is not simulated, holds nothing. `work` is like
// ReduceSum's.
template <class T, class Choose>
void reduce_to_extreme(const char* name, const LocalTensor<T>& dst, const LocalTensor<T>& src, const LocalTensor<T>& work,
                       int32_t count, bool index, const host::Place& place, Choose choose) {
    host::enter_vector(name, &host::Counters::vector_reductions, count, place);
    host::require(count >= 1, "no elements");
    host::require(!index, "indices are not simulated");
    const T* from = src.read(host::Unit::Vector, 0, count);
    const T value = *choose(from, from + count);
    const int64_t repeats = (count + host::REPEAT<T> - 1) / host::REPEAT<T>,
                  used = host::rounded_up(2 * repeats, host::BLOCK<T>);
    work.write(host::Unit::Vector, 0, used);
    work.spoil(0, used * static_cast<int64_t>(sizeof(T)));
    *dst.write(host::Unit::Element, 0, 1) = value;
    dst.touch(host::Unit::Vector, 0, 1, true);
}

template <host::Floating T>
void ReduceMax(const LocalTensor<T>& dst, const LocalTensor<T>& src, const LocalTensor<T>& work, const int32_t count,
               bool calIndex = false, HOST_PLACE) {
    reduce_to_extreme("ReduceMax", dst, src, work, count, calIndex, place,
                      [](auto a, auto b) { return std::max_element(a, b); });
}

template <host::Floating T>
void ReduceMin(const LocalTensor<T>& dst, const LocalTensor<T>& src, const LocalTensor<T>& work, const int32_t count,
               bool calIndex = false, HOST_PLACE) {
    reduce_to_extreme("ReduceMin", dst, src, work, count, calIndex, place,
                      [](auto a, auto b) { return std::min_element(a, b); });
}

// Sums of blocks of 32 bytes. Of each repeat only the first `mask` elements count. The stride of dst is in results of a repeat
// (8).
template <host::Floating T, bool isSetMask = true>
void BlockReduceSum(const LocalTensor<T>& dst, const LocalTensor<T>& src, const int32_t repeats, const int32_t mask,
                    const int32_t dstRepStride, const int32_t srcBlkStride, const int32_t srcRepStride, HOST_PLACE) {
    host::enter_vector("BlockReduceSum", &host::Counters::vector_reductions, int64_t{repeats} * mask, place);
    host::require(repeats >= 0 && repeats <= 255, "more than 255 repeats");
    host::check_mask(mask, host::REPEAT<T>);
    for (int64_t r = 0; r < repeats; r++) {
        for (int64_t block = 0; block < 8; block++) {
            const int64_t count = std::clamp<int64_t>(mask - block * host::BLOCK<T>, 0, host::BLOCK<T>);
            float sum = 0;
            if (count > 0) {
                const int64_t first = (r * srcRepStride + block * srcBlkStride) * host::BLOCK<T>;
                sum = host::tree_sum(src.read(host::Unit::Vector, first, count), count);
            }
            // The destination needs no block of its own.
            *dst.write(host::Unit::Element, r * dstRepStride * 8 + block, 1) = T(sum);
        }
        dst.touch(host::Unit::Vector, r * dstRepStride * 8, 8, true);
    }
}

// One sum per repeat, of its first `mask` elements. The stride of dst is in elements.
template <host::Floating T, bool isSetMask = true>
void WholeReduceSum(const LocalTensor<T>& dst, const LocalTensor<T>& src, const int32_t mask, const int32_t repeats,
                    const int32_t dstRepStride, const int32_t srcBlkStride, const int32_t srcRepStride, HOST_PLACE) {
    host::enter_vector("WholeReduceSum", &host::Counters::vector_reductions, int64_t{repeats} * mask, place);
    host::require(repeats >= 0 && repeats <= 255, "more than 255 repeats");
    host::check_mask(mask, host::REPEAT<T>);
    for (int64_t r = 0; r < repeats; r++) {
        T values[host::REPEAT<T>];
        for (int64_t i = 0; i < mask; i += host::BLOCK<T>) {
            const int64_t count = std::min<int64_t>(host::BLOCK<T>, mask - i);
            const int64_t first = (r * srcRepStride + i / host::BLOCK<T> * srcBlkStride) * host::BLOCK<T>;
            std::copy_n(src.read(host::Unit::Vector, first, count), count, values + i);
        }
        *dst.write(host::Unit::Element, r * dstRepStride, 1) = T(host::tree_sum(values, mask));
        dst.touch(host::Unit::Vector, r * dstRepStride, 1, true);
    }
}

// Bits of whether src0[i] and src1[i] compare so.
template <host::Floating T>
void Compare(const LocalTensor<uint8_t>& dst, const LocalTensor<T>& src0, const LocalTensor<T>& src1, CMPMODE mode,
             uint32_t count, HOST_PLACE) {
    host::enter_vector("Compare", &host::Counters::vector_selections, count, place);
    host::check_repeats<T>(count);
    const T *x = src0.read(host::Unit::Vector, 0, count), *y = src1.read(host::Unit::Vector, 0, count);
    host::write_bits(dst, count, [&](int64_t i) { return host::compared(x[i], y[i], mode); });
}

// int32_t compares for equality only.
template <class T>
    requires(host::Floating<T> || std::same_as<T, int32_t>)
void CompareScalar(const LocalTensor<uint8_t>& dst, const LocalTensor<T>& src, const T scalar, CMPMODE mode, uint32_t count,
                   HOST_PLACE) {
    host::enter_vector("CompareScalar", &host::Counters::vector_selections, count, place);
    host::check_repeats<T>(count);
    if constexpr (std::same_as<T, int32_t>) host::require(mode == CMPMODE::EQ, "int32_t compares for equality only");
    const T* x = src.read(host::Unit::Vector, 0, count);
    host::write_bits(dst, count, [&](int64_t i) { return host::compared(x[i], scalar, mode); });
}

// src0[i] where the bit is set, else the scalar or src1[i].
template <host::Floating T, class M>
void Select(const LocalTensor<T>& dst, const LocalTensor<M>& bits, const LocalTensor<T>& src0, T scalar, SELMODE mode,
            uint32_t count, HOST_PLACE) {
    host::enter_vector("Select", &host::Counters::vector_selections, count, place);
    host::require(mode == SELMODE::VSEL_TENSOR_SCALAR_MODE, "a scalar in a mode of tensors");
    const uint8_t* chosen = bits.template ReinterpretCast<uint8_t>().read(host::Unit::Vector, 0, (count + 7) / 8);
    const T* x = src0.read(host::Unit::Vector, 0, count);
    T* to = dst.write(host::Unit::Vector, 0, count);
    for (int64_t i = 0; i < count; i++) to[i] = chosen[i / 8] >> i % 8 & 1 ? x[i] : scalar;
}

template <host::Floating T, class M>
void Select(const LocalTensor<T>& dst, const LocalTensor<M>& bits, const LocalTensor<T>& src0, const LocalTensor<T>& src1,
            SELMODE mode, uint32_t count, HOST_PLACE) {
    host::enter_vector("Select", &host::Counters::vector_selections, count, place);
    host::require(mode == SELMODE::VSEL_TENSOR_TENSOR_MODE, "two tensors in a mode of scalars");
    const uint8_t* chosen = bits.template ReinterpretCast<uint8_t>().read(host::Unit::Vector, 0, (count + 7) / 8);
    const T *x = src0.read(host::Unit::Vector, 0, count), *y = src1.read(host::Unit::Vector, 0, count);
    T* to = dst.write(host::Unit::Vector, 0, count);
    for (int64_t i = 0; i < count; i++) to[i] = chosen[i / 8] >> i % 8 & 1 ? x[i] : y[i];
}

// dst[i] = the element of src at (base + offsets[i]) bytes.
template <class T>
    requires(sizeof(T) == 2 || sizeof(T) == 4)
void Gather(const LocalTensor<T>& dst, const LocalTensor<T>& src, const LocalTensor<uint32_t>& offsets, const uint32_t base,
            const uint32_t count, HOST_PLACE) {
    host::enter_vector("Gather", &host::Counters::vector_gathers, count, place);
    const uint32_t* from = offsets.read(host::Unit::Vector, 0, count);
    std::vector<T> values(count);
    int64_t first = std::numeric_limits<int64_t>::max(), last = -1;
    for (uint32_t i = 0; i < count; i++) {
        const int64_t bytes = int64_t{base} + from[i];
        host::require(bytes % static_cast<int64_t>(sizeof(T)) == 0, "offset ", bytes, " is not aligned to the elements");
        const int64_t element = bytes / static_cast<int64_t>(sizeof(T));
        values[i] = *src.read(host::Unit::Element, element, 1);
        first = std::min(first, element);
        last = std::max(last, element);
    }
    if (last >= 0) src.touch(host::Unit::Vector, first, last - first + 1, false);
    std::copy(values.begin(), values.end(), dst.write(host::Unit::Vector, 0, count));
}

// Each of 8 elements per repeat fills a block of 32 bytes.
template <class T>
    requires(sizeof(T) == 2 || sizeof(T) == 4)
void Brcb(const LocalTensor<T>& dst, const LocalTensor<T>& src, const uint8_t repeats, const BrcbRepeatParams& params,
          HOST_PLACE) {
    host::enter_vector("Brcb", &host::Counters::vector_fills, int64_t{repeats} * 8 * host::BLOCK<T>, place);
    const T* from = src.read(host::Unit::Vector, 0, int64_t{repeats} * 8);
    for (int64_t i = 0; i < int64_t{repeats} * 8; i++) {
        const int64_t block = i / 8 * params.dstRepStride + i % 8 * params.dstBlkStride;
        std::fill_n(dst.write(host::Unit::Vector, block * host::BLOCK<T>, host::BLOCK<T>), host::BLOCK<T>, from[i]);
    }
}

}  // namespace AscendC
