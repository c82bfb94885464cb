// What the host hands to a kernel besides tensors: plans, tilings and the like.
#pragma once

#include <cstring>
#include <memory>
#include <new>
#include <vector>

#include "host/global_memory.h"

namespace driver {

// A registered copy in memory of its own, aligned as the device aligns it: it shares no cache line with anything else. Null where
// there is nothing.
class HostNumbers {
  public:
    HostNumbers(const void* data, size_t bytes)
        : memory_(bytes == 0 ? nullptr : allocate(bytes)), registered_(host::global(memory_.get(), static_cast<int64_t>(bytes))) {
        if (bytes > 0) std::memcpy(memory_.get(), data, bytes);
    }
    template <class T>
    explicit HostNumbers(const std::vector<T>& values) : HostNumbers(values.data(), values.size() * sizeof(T)) {}

    GM_ADDR address() const { return memory_.get(); }

  private:
    static constexpr size_t ALIGNMENT = 512;
    struct Free {
        void operator()(uint8_t* memory) const { ::operator delete(memory, std::align_val_t{ALIGNMENT}); }
    };
    static uint8_t* allocate(size_t bytes) {
        return static_cast<uint8_t*>(::operator new((bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT, std::align_val_t{ALIGNMENT}));
    }

    std::unique_ptr<uint8_t, Free> memory_;
    host::Allocation registered_;
};

}  // namespace driver
