// Global memory: only what the driver registered may be touched.
#pragma once

#include <cstddef>
#include <map>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <vector>

#include "cache.h"
#include "core.h"
#include "numbers.h"
#include "pipes.h"
#include "races.h"

namespace host {

// Registered memory. Where `written` is not empty, it tells for each byte whether something has been stored there.
struct Region {
    uint8_t* begin;
    int64_t bytes;
    std::vector<uint8_t> written;

    void record_line(Core& c, const void* address) const {
        const uintptr_t line = line_of(reinterpret_cast<uintptr_t>(address));
        const uintptr_t first = std::max(line, reinterpret_cast<uintptr_t>(begin));
        const uintptr_t last = std::min(line + LINE_BYTES, reinterpret_cast<uintptr_t>(begin + bytes));
        record(c, reinterpret_cast<const void*>(first), static_cast<int64_t>(last - first), Access::Kind::Write);
    }
};

struct Regions {
    std::shared_mutex mutex;
    std::map<const uint8_t*, Region*> all;  // by begin
    std::mutex atomic;                      // one atomic copy at a time

    Region* find(const uint8_t* address) {
        std::shared_lock lock(mutex);
        auto after = all.upper_bound(address);
        if (after == all.begin()) return nullptr;
        Region* region = std::prev(after)->second;
        return address < region->begin + region->bytes ? region : nullptr;
    }
};

inline Regions& regions() {
    static Regions all;
    return all;
}

// Global memory for as long as this lives, which must be longer than the launches that use it.
class Allocation {
  public:
    Allocation(void* pointer, int64_t bytes, bool holds_something) : region_(std::make_unique<Region>()) {
        region_->begin = static_cast<uint8_t*>(pointer);
        region_->bytes = pointer == nullptr ? 0 : bytes;
        if (!holds_something) region_->written.resize(static_cast<size_t>(region_->bytes));
        if (region_->bytes == 0) return;
        std::unique_lock lock(regions().mutex);
        auto& all = regions().all;
        auto after = all.lower_bound(region_->begin);
        const bool overlaps =
            (after != all.end() && after->first < region_->begin + bytes) ||
            (after != all.begin() && std::prev(after)->second->begin + std::prev(after)->second->bytes > region_->begin);
        if (overlaps) throw Error("global memory is registered twice");
        all[region_->begin] = region_.get();
    }
    Allocation(Allocation&&) = default;
    Allocation(const Allocation&) = delete;
    ~Allocation() {
        if (region_ == nullptr || region_->bytes == 0) return;
        std::unique_lock lock(regions().mutex);
        regions().all.erase(region_->begin);
    }

    // Throws if a byte of an output was left as it was; called after a launch.
    void require_written(const char* name) const {
        const auto& written = region_->written;
        const auto missing = std::find(written.begin(), written.end(), 0);
        if (missing != written.end()) {
            throw Error(std::string(name) + ": byte " + std::to_string(missing - written.begin()) + " of " +
                        std::to_string(written.size()) + " was never written");
        }
    }

  private:
    std::unique_ptr<Region> region_;
};

// Memory that holds something: inputs, and outputs that are added to. A null pointer, or no bytes, registers nothing.
inline Allocation global(const void* pointer, int64_t bytes) { return Allocation(const_cast<void*>(pointer), bytes, true); }

// Memory that holds nothing yet, such as an output: reading a byte before it was written throws.
inline Allocation unwritten(void* pointer, int64_t bytes) { return Allocation(pointer, bytes, false); }

// Workspace: memory of its own that holds nothing yet, aligned as the device aligns it.
class Workspace {
  public:
    explicit Workspace(int64_t bytes)
        : memory_(
              static_cast<uint8_t*>(::operator new(static_cast<size_t>(std::max<int64_t>(bytes, 1)), std::align_val_t{512}))),
          allocation_(memory_.get(), bytes, false) {
        // Whoever finds a way around the guards shall at least not find zeros.
        std::memset(memory_.get(), 0xA5, static_cast<size_t>(bytes));
    }
    uint8_t* data() const { return memory_.get(); }

  private:
    struct Free {
        void operator()(uint8_t* memory) const { ::operator delete(memory, std::align_val_t{512}); }
    };
    std::unique_ptr<uint8_t, Free> memory_;
    Allocation allocation_;
};

// Throws if the core touches what a product of its own has yet to write, or writes what it has yet to read, or what another
// pipe may still be busy with.
inline void check_order(const void* address, int64_t bytes, Unit unit, Access::Kind kind) {
    const Core& c = core();
    const uintptr_t begin = reinterpret_cast<uintptr_t>(address), end = begin + static_cast<uintptr_t>(bytes);
    if (c.pipes != nullptr) {
        // The scalar unit tells the cube what to do.
        unit == Unit::Cube ? c.pipes->check(Pipe::S, kind, begin, end) : c.pipes->touch(pipe_of(unit), kind, begin, end);
    }
    if (unit == Unit::Scalar) {
        kind == Access::Kind::Read ? c.cache->read(begin) : c.cache->write(begin);
    } else {
        c.cache->passed_by(begin, end, kind != Access::Kind::Read);
    }
    if (unit == Unit::Cube) return;
    for (const Pending& p : c.pending) {
        require((kind == Access::Kind::Read && !p.result) || end <= p.begin || p.end <= begin,
                p.result ? "the result" : "an operand", " of a product that WaitIterateAll has not waited for");
    }
}

}  // namespace host

namespace AscendC {

template <class T>
class GlobalTensor {
  public:
    using PrimType = T;

    void SetGlobalBuffer(T* buffer, uint64_t bufferSize) {
        data_ = buffer;
        count_ = static_cast<int64_t>(bufferSize);
        region_ = host::regions().find(reinterpret_cast<const uint8_t*>(buffer));
    }
    // As far as the registered memory goes.
    void SetGlobalBuffer(T* buffer) {
        SetGlobalBuffer(buffer, 0);
        if (region_ == nullptr) return;
        count_ = (region_->begin + region_->bytes - reinterpret_cast<uint8_t*>(buffer)) / static_cast<int64_t>(sizeof(T));
    }

    // For the stand-in:
    uintptr_t address() const { return reinterpret_cast<uintptr_t>(data_); }

    GlobalTensor operator[](uint64_t offset) const {
        GlobalTensor part = *this;
        part.data_ += offset;
        part.count_ -= static_cast<int64_t>(offset);
        return part;
    }

    T GetValue(uint64_t offset, HOST_PLACE) const {
        host::Core& c = host::enter("GlobalTensor::GetValue", place);
        c.counters.scalar_global_reads++;
        return *read(host::Unit::Scalar, static_cast<int64_t>(offset), 1);
    }
    void SetValue(uint64_t offset, T value, HOST_PLACE) const {
        host::Core& c = host::enter("GlobalTensor::SetValue", place);
        c.counters.scalar_global_writes++;
        *write(host::Unit::Scalar, static_cast<int64_t>(offset), 1, host::Access::Kind::Write) = value;
    }

    uint64_t GetSize() const { return static_cast<uint64_t>(count_); }
    const T* GetPhyAddr(uint64_t offset = 0) const { return data_ + offset; }

    // For the stand-in: the elements [offset, offset + count), checked and recorded.
    const T* read(host::Unit unit, int64_t offset, int64_t count) const {
        const T* from = checked(offset, count);
        host::check_order(from, count * static_cast<int64_t>(sizeof(T)), unit, host::Access::Kind::Read);
        const auto& written = region_->written;
        if (!written.empty()) {
            const auto first = written.begin() + (reinterpret_cast<const uint8_t*>(from) - region_->begin);
            const auto last = first + count * static_cast<int64_t>(sizeof(T));
            const auto missing = std::find(first, last, 0);
            host::require(missing == last, "reads global memory that was never written, at element ",
                          offset + (missing - first) / static_cast<int64_t>(sizeof(T)));
        }
        host::record(host::core(), from, count * static_cast<int64_t>(sizeof(T)), host::Access::Kind::Read);
        return from;
    }
    T* write(host::Unit unit, int64_t offset, int64_t count, host::Access::Kind kind) const {
        T* to = checked(offset, count);
        const int64_t bytes = count * static_cast<int64_t>(sizeof(T));
        host::check_order(to, bytes, unit, kind);
        if (!region_->written.empty())
            std::fill_n(region_->written.begin() + (reinterpret_cast<uint8_t*>(to) - region_->begin), bytes, 1);
        host::record(host::core(), to, bytes, kind);
        // The cache writes whole lines.
        if (unit == host::Unit::Scalar) region_->record_line(host::core(), to);
        return to;
    }

  private:
    T* checked(int64_t offset, int64_t count) const {
        host::require(data_ != nullptr, "global tensor without a buffer");
        host::require(region_ != nullptr, "global memory that was not registered");
        host::require(offset >= 0 && count >= 0 && offset + count <= count_, "global tensor of ", count_, " elements: [",
                      offset, ", ", offset + count, ") is out of bounds");
        T* first = data_ + offset;
        const auto* begin = reinterpret_cast<const uint8_t*>(first);
        host::require(
            begin >= region_->begin && begin + count * static_cast<int64_t>(sizeof(T)) <= region_->begin + region_->bytes,
            "outside of the registered global memory: its ", region_->bytes, " bytes end before byte ",
            begin + count * static_cast<int64_t>(sizeof(T)) - region_->begin);
        host::require(reinterpret_cast<uintptr_t>(first) % sizeof(T) == 0, "global memory is not aligned to its elements");
        return first;
    }

    T* data_ = nullptr;
    int64_t count_ = 0;
    host::Region* region_ = nullptr;
};

enum class CacheLine { SINGLE_CACHE_LINE = 0, ENTIRE_DATA_CACHE };
enum class DcciDst { CACHELINE_ALL = 0, CACHELINE_UB, CACHELINE_OUT, CACHELINE_ATOMIC };

// Writes back and forgets what the scalar unit's cache holds: of the line that `dst` begins in, or all.
template <class T, CacheLine entireType, DcciDst dcciDst = DcciDst::CACHELINE_OUT>
void DataCacheCleanAndInvalid(const GlobalTensor<T>& dst, HOST_PLACE) {
    host::Cache& cache = *host::enter("DataCacheCleanAndInvalid", place).cache;
    entireType == CacheLine::SINGLE_CACHE_LINE ? cache.clean(dst.address()) : cache.clean();
}

}  // namespace AscendC
