// The scalar unit reaches global memory through a cache of its core, in lines of 64 bytes, which nothing keeps up to date: what
// it writes stays there until DataCacheCleanAndInvalid, and what it has read is read again from there. Copies and products pass
// it by.
#pragma once

#include <cstdint>
#include <set>

#include "core.h"

namespace host {

inline constexpr uintptr_t LINE_BYTES = 64;

inline uintptr_t line_of(uintptr_t address) { return address / LINE_BYTES * LINE_BYTES; }

class Cache {
  public:
    void read(uintptr_t address) {
        const uintptr_t line = line_of(address);
        require(!stale_.contains(line),
                "reads what its cache holds from before it was written: DataCacheCleanAndInvalid comes first");
        lines_.insert(line);
    }
    void write(uintptr_t address) {
        read(address);
        dirty_.insert(line_of(address));
    }
    // A copy or a product of this core, or anything of another core, touches [begin, end).
    void passed_by(uintptr_t begin, uintptr_t end, bool writes) {
        require(!has(dirty_, begin, end),
                "memory whose new value is in the scalar unit's cache: DataCacheCleanAndInvalid comes first");
        if (!writes) return;
        for (auto it = lines_.lower_bound(line_of(begin)); it != lines_.end() && *it < end; ++it) stale_.insert(*it);
    }
    void clean() {
        lines_.clear();
        stale_.clear();
        dirty_.clear();
    }
    void clean(uintptr_t address) {
        lines_.erase(line_of(address));
        stale_.erase(line_of(address));
        dirty_.erase(line_of(address));
    }
    bool dirty() const { return !dirty_.empty(); }

  private:
    static bool has(const std::set<uintptr_t>& lines, uintptr_t begin, uintptr_t end) {
        const auto it = lines.lower_bound(line_of(begin));
        return it != lines.end() && *it < end;
    }

    std::set<uintptr_t> lines_, stale_, dirty_;
};

}  // namespace host
