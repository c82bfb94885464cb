// DataCopy, DataCopyPad, and atomic adding to global memory.
#pragma once

#include <cstring>

#include "global_memory.h"
#include "local_memory.h"

namespace AscendC {

// Lengths and strides of local memory are in blocks of 32 bytes everywhere.
struct DataCopyParams {
    uint16_t blockCount = 1, blockLen = 0;  // blockLen in blocks of 32 bytes
    uint16_t srcStride = 0, dstStride = 0;  // from the end of a block to the next one's beginning
};

struct DataCopyExtParams {
    uint16_t blockCount = 1;
    uint32_t blockLen = 0;                  // bytes
    uint32_t srcStride = 0, dstStride = 0;  // from the end of a block to the next one's beginning; in bytes in global memory
    uint32_t rsv = 0;
    DataCopyExtParams() = default;
    DataCopyExtParams(uint16_t count, uint32_t length, uint32_t source, uint32_t destination, uint32_t reserved)
        : blockCount(count), blockLen(length), srcStride(source), dstStride(destination), rsv(reserved) {}
};

template <class T>
struct DataCopyPadExtParams {
    bool isPad = false;
    uint8_t leftPadding = 0, rightPadding = 0;  // elements
    T paddingValue{};
    DataCopyPadExtParams() = default;
    DataCopyPadExtParams(bool pad, uint8_t left, uint8_t right, T value)
        : isPad(pad), leftPadding(left), rightPadding(right), paddingValue(value) {}
};

}  // namespace AscendC

namespace host {

template <class T>
concept Addable = Narrow<T> || std::same_as<T, float> || std::same_as<T, int32_t> || std::same_as<T, int16_t>;

template <class T>
int64_t elements_in(int64_t bytes) {
    require(bytes % static_cast<int64_t>(sizeof(T)) == 0, "a length of ", bytes, " bytes is no number of elements");
    return bytes / static_cast<int64_t>(sizeof(T));
}

// From local memory to [first, first + count) of `to`, added where SetAtomicAdd is on.
template <class T>
void copy_out(Core& c, const AscendC::GlobalTensor<T>& to, int64_t first, const T* from, int64_t count) {
    if (c.atomic == nullptr) {
        std::memcpy(to.write(Unit::CopyOut, first, count, Access::Kind::Write), from, static_cast<size_t>(count) * sizeof(T));
    } else if constexpr (Addable<T>) {
        require(c.atomic == &TYPE_TAG<T>, "SetAtomicAdd was called for another type than is copied");
        T* sums = to.write(Unit::CopyOut, first, count, Access::Kind::Atomic);
        std::lock_guard lock(regions().atomic);
        for (int64_t i = 0; i < count; i++) sums[i] = T(widened(sums[i]) + widened(from[i]));
        c.counters.atomic_elements += count;
    } else {
        fail("this type cannot be added atomically");
    }
    c.counters.bytes_local_to_global += count * static_cast<int64_t>(sizeof(T));
}

inline int64_t whole_blocks(int64_t bytes) {
    require(bytes > 0 && bytes % BLOCK_BYTES == 0, "a length of ", bytes, " bytes is no multiple of ", BLOCK_BYTES,
            " greater than 0: DataCopyPad copies any length");
    return bytes;
}

inline void check_blocks(int64_t count, int64_t bytes) {
    require(count >= 1 && count <= 4095, count, " blocks: there may be 1 to 4095");
    require(bytes >= 1 && bytes <= 2097151, "blocks of ", bytes, " bytes: there may be 1 to 2097151");
}

}  // namespace host

namespace AscendC {

template <class T>
void DataCopy(const LocalTensor<T>& dst, const GlobalTensor<T>& src, const DataCopyParams& params, HOST_PLACE) {
    host::Core& c = host::enter("DataCopy", place);
    c.counters.copies++;
    const int64_t bytes = host::whole_blocks(params.blockLen * host::BLOCK_BYTES), count = host::elements_in<T>(bytes);
    const int64_t gap = host::elements_in<T>(host::BLOCK_BYTES);
    host::check_blocks(params.blockCount, bytes);
    for (int64_t i = 0; i < params.blockCount; i++) {
        const T* from = src.read(host::Unit::CopyIn, i * (count + params.srcStride * gap), count);
        std::memcpy(dst.write(host::Unit::CopyIn, i * (count + params.dstStride * gap), count), from,
                    static_cast<size_t>(bytes));
        c.counters.bytes_global_to_local += bytes;
    }
}

template <class T>
void DataCopy(const LocalTensor<T>& dst, const GlobalTensor<T>& src, uint32_t count, HOST_PLACE) {
    host::Core& c = host::enter("DataCopy", place);
    c.counters.copies++;
    const int64_t bytes = host::whole_blocks(int64_t{count} * static_cast<int64_t>(sizeof(T)));
    const T* from = src.read(host::Unit::CopyIn, 0, count);
    std::memcpy(dst.write(host::Unit::CopyIn, 0, count), from, static_cast<size_t>(bytes));
    c.counters.bytes_global_to_local += bytes;
}

template <class T>
void DataCopy(const GlobalTensor<T>& dst, const LocalTensor<T>& src, const DataCopyParams& params, HOST_PLACE) {
    host::Core& c = host::enter("DataCopy", place);
    c.counters.copies++;
    const int64_t bytes = host::whole_blocks(params.blockLen * host::BLOCK_BYTES), count = host::elements_in<T>(bytes);
    const int64_t gap = host::elements_in<T>(host::BLOCK_BYTES);
    host::check_blocks(params.blockCount, bytes);
    for (int64_t i = 0; i < params.blockCount; i++) {
        const T* from = src.read(host::Unit::CopyOut, i * (count + params.srcStride * gap), count);
        host::copy_out(c, dst, i * (count + params.dstStride * gap), from, count);
    }
}

template <class T>
void DataCopy(const GlobalTensor<T>& dst, const LocalTensor<T>& src, uint32_t count, HOST_PLACE) {
    host::Core& c = host::enter("DataCopy", place);
    c.counters.copies++;
    host::whole_blocks(int64_t{count} * static_cast<int64_t>(sizeof(T)));
    host::copy_out(c, dst, 0, src.read(host::Unit::CopyOut, 0, count), count);
}

// Within local memory it is the vector unit that copies.
template <class T>
void DataCopy(const LocalTensor<T>& dst, const LocalTensor<T>& src, uint32_t count, HOST_PLACE) {
    host::Core& c = host::enter("DataCopy", place);
    c.counters.copies++;
    const int64_t bytes = host::whole_blocks(int64_t{count} * static_cast<int64_t>(sizeof(T)));
    const T* from = src.read(host::Unit::Vector, 0, count);
    std::memmove(dst.write(host::Unit::Vector, 0, count), from, static_cast<size_t>(bytes));
    c.counters.bytes_local_to_local += bytes;
}

// Each block is padded to whole 32 bytes. Padding that was not asked for holds nothing that may be read.
template <class T>
void DataCopyPad(const LocalTensor<T>& dst, const GlobalTensor<T>& src, const DataCopyExtParams& params,
                 const DataCopyPadExtParams<T>& padding, HOST_PLACE) {
    host::Core& c = host::enter("DataCopyPad", place);
    c.counters.copies++;
    constexpr int64_t size = sizeof(T);
    host::check_blocks(params.blockCount, params.blockLen);
    const int64_t count = host::elements_in<T>(params.blockLen);
    const int64_t left = padding.isPad ? padding.leftPadding : 0, right = padding.isPad ? padding.rightPadding : 0;
    host::require(left * size <= host::BLOCK_BYTES && right * size <= host::BLOCK_BYTES,
                  "more than 32 bytes of padding at a side");
    if constexpr (size == 8)
        host::require(left + right == 0 || padding.paddingValue == T{}, "8-byte elements are padded with 0 only");
    const int64_t filled = left + count + right, whole = host::rounded_up(filled * size, host::BLOCK_BYTES) / size;
    const int64_t step = whole + params.dstStride * host::BLOCK_BYTES / size;
    for (int64_t i = 0; i < params.blockCount; i++) {
        const T* from = src.read(host::Unit::CopyIn, i * (count + host::elements_in<T>(params.srcStride)), count);
        T* to = dst.write(host::Unit::CopyIn, i * step, whole);
        std::fill_n(to, left, padding.paddingValue);
        std::memcpy(to + left, from, static_cast<size_t>(count * size));
        std::fill_n(to + left + count, right, padding.paddingValue);
        dst.spoil((i * step + filled) * size, (whole - filled) * size);
        c.counters.bytes_global_to_local += count * size;
    }
}

template <class T>
void DataCopyPad(const GlobalTensor<T>& dst, const LocalTensor<T>& src, const DataCopyExtParams& params, HOST_PLACE) {
    host::Core& c = host::enter("DataCopyPad", place);
    c.counters.copies++;
    constexpr int64_t size = sizeof(T);
    host::check_blocks(params.blockCount, params.blockLen);
    const int64_t count = host::elements_in<T>(params.blockLen);
    const int64_t step = (host::rounded_up(params.blockLen, host::BLOCK_BYTES) + params.srcStride * host::BLOCK_BYTES) / size;
    for (int64_t i = 0; i < params.blockCount; i++) {
        const T* from = src.read(host::Unit::CopyOut, i * step, count);
        host::copy_out(c, dst, i * (count + host::elements_in<T>(params.dstStride)), from, count);
    }
}

template <host::Addable T>
void SetAtomicAdd(HOST_PLACE) {
    host::enter("SetAtomicAdd", place).atomic = &host::TYPE_TAG<T>;
}

inline void SetAtomicNone(HOST_PLACE) { host::enter("SetAtomicNone", place).atomic = nullptr; }

}  // namespace AscendC
