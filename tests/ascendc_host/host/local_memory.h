// Local memory (the unified buffer) of a core, and who may touch a queue's tensor when.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "core.h"
#include "numbers.h"
#include "pipes.h"

namespace host {

// A queue's tensor goes from the unit that fills it to the one that uses it through EnQue and DeQue, which is where the device
// waits. A touch that shows that this was left out throws.
inline void check_turn(Buffer& buffer, Unit unit, bool writes) {
    using State = Buffer::State;
    require(buffer.state != State::Released, "local memory of a TPipe that is gone");
    if (!buffer.of_queue) return;
    require(buffer.state != State::Free, "a queue's tensor that was freed, or not allocated");
    require(buffer.state != State::Enqueued, "a tensor that is in its queue: DeQue comes first");
    if (buffer.state == State::Dequeued) {
        require(unit != Unit::CopyIn, "a copy into a tensor that was dequeued: free and allocate it first");
        return;
    }
    if (unit == Unit::CopyIn) {
        require(!buffer.calculated, "a copy into a tensor that another unit has written to since it was allocated");
        buffer.copied = true;
    } else if (unit == Unit::CopyOut) {
        require(false, "a copy out of a tensor that did not go through its queue: EnQue and DeQue come first");
    } else {
        require(!buffer.copied, "a tensor that a copy fills: EnQue and DeQue come first");
        buffer.calculated = buffer.calculated || writes;
    }
}

}  // namespace host

namespace AscendC {

template <class T>
class LocalTensor {
  public:
    using PrimType = T;

    LocalTensor() = default;
    LocalTensor(host::Buffer* buffer, int64_t begin, int64_t bytes) : buffer_(buffer), begin_(begin), bytes_(bytes) {}

    T GetValue(uint32_t index, HOST_PLACE) const {
        host::Core& c = host::enter("LocalTensor::GetValue", place);
        c.counters.scalar_local_reads++;
        T value;
        std::memcpy(&value, read(host::Unit::Scalar, index, 1), sizeof value);
        return value;
    }
    void SetValue(uint32_t index, T value, HOST_PLACE) const {
        host::Core& c = host::enter("LocalTensor::SetValue", place);
        c.counters.scalar_local_writes++;
        std::memcpy(write(host::Unit::Scalar, index, 1), &value, sizeof value);
    }
    LocalTensor operator[](uint32_t offset) const {
        const int64_t skipped = int64_t{offset} * static_cast<int64_t>(sizeof(T));
        return LocalTensor(buffer_, begin_ + skipped, bytes_ - skipped);
    }
    template <class U>
    LocalTensor<U> ReinterpretCast() const {
        return LocalTensor<U>(buffer_, begin_, bytes_);
    }
    uint32_t GetSize() const { return static_cast<uint32_t>(bytes_ / static_cast<int64_t>(sizeof(T))); }
    void SetSize(uint32_t size) { bytes_ = int64_t{size} * static_cast<int64_t>(sizeof(T)); }

    // For the stand-in. The elements [first, first + count), all of which must have been written:
    const T* read(host::Unit unit, int64_t first, int64_t count) const {
        const int64_t begin = checked(unit, first, count, false);
        const uint8_t* written = host::core().written.data() + begin;
        const void* missing = std::memchr(written, 0, static_cast<size_t>(count) * sizeof(T));
        host::require(missing == nullptr, "reads local memory that was never written, at element ",
                      first + (static_cast<const uint8_t*>(missing) - written) / static_cast<int64_t>(sizeof(T)), " of ",
                      bytes_ / static_cast<int64_t>(sizeof(T)));
        return reinterpret_cast<const T*>(host::core().memory.data() + begin);
    }
    // The same elements, which hold something from now on:
    T* write(host::Unit unit, int64_t first, int64_t count) const {
        const int64_t begin = checked(unit, first, count, true);
        std::memset(host::core().written.data() + begin, 1, static_cast<size_t>(count) * sizeof(T));
        return reinterpret_cast<T*>(host::core().memory.data() + begin);
    }
    // What the device overwrites with bytes nobody knows.
    void spoil(int64_t first_byte, int64_t bytes) const {
        std::memset(host::core().written.data() + begin_ + first_byte, 0, static_cast<size_t>(bytes));
        std::memset(host::core().memory.data() + begin_ + first_byte, 0xA5, static_cast<size_t>(bytes));
    }
    // Tells the pipes; Unit::Element does not, whoever uses it calls this once for all elements.
    void touch(host::Unit unit, int64_t first, int64_t count, bool writes) const {
        if (host::core().pipes == nullptr) return;
        const auto begin = static_cast<uintptr_t>(begin_ + first * static_cast<int64_t>(sizeof(T)));
        host::core().pipes->touch(host::pipe_of(unit), writes ? host::Access::Kind::Write : host::Access::Kind::Read, begin,
                                  begin + static_cast<uintptr_t>(count) * sizeof(T));
    }
    host::Buffer* buffer() const { return buffer_; }
    int64_t begin() const { return begin_; }

  private:
    int64_t checked(host::Unit unit, int64_t first, int64_t count, bool writes) const {
        constexpr int64_t size = sizeof(T);
        host::require(buffer_ != nullptr, "local tensor without memory");
        host::check_turn(*buffer_, unit, writes);
        host::require(first >= 0 && count >= 0 && (first + count) * size <= bytes_, "local tensor of ", bytes_ / size,
                      " elements: [", first, ", ", first + count, ") is out of bounds");
        const int64_t begin = begin_ + first * size, end = begin + count * size;
        host::require(begin >= buffer_->begin && end <= buffer_->begin + buffer_->bytes, "outside of the buffer of ",
                      buffer_->bytes, " bytes that the tensor lies in");
        const bool any_element = unit == host::Unit::Scalar || unit == host::Unit::Element;
        const int64_t unit_bytes = any_element ? size : host::BLOCK_BYTES;
        host::require(begin % unit_bytes == 0, "a local address that is not aligned to ", unit_bytes, " bytes: byte ",
                      begin - buffer_->begin, " of its buffer");
        if (unit != host::Unit::Element) touch(unit, first, count, writes);
        return begin;
    }

    host::Buffer* buffer_ = nullptr;
    int64_t begin_ = 0, bytes_ = 0;  // in local memory
};

}  // namespace AscendC
