// Between two SyncAll nothing orders the cores: global memory that one of them writes must not be touched by another, unless
// both add to it atomically. What was touched is compared at every SyncAll and at the end, whatever the order in which cores
// ran.
#pragma once

#include <algorithm>
#include <string>
#include <vector>

#include "cache.h"
#include "core.h"

namespace host {

// Adjacent accesses of one line of the kernel become one.
inline void record(Core& c, const void* address, int64_t bytes, Access::Kind kind) {
    if (bytes == 0) return;
    const uintptr_t begin = reinterpret_cast<uintptr_t>(address), end = begin + static_cast<uintptr_t>(bytes);
    // Loops alternate between a few arrays.
    for (size_t i = c.accesses.size(), last = i > 4 ? i - 4 : 0; i > last; i--) {
        Access& before = c.accesses[i - 1];
        const bool same = before.kind == kind && before.line == c.place.line() && before.operation == c.operation;
        if (same && before.begin <= end && begin <= before.end) {
            before.begin = std::min(before.begin, begin);
            before.end = std::max(before.end, end);
            return;
        }
    }
    c.accesses.push_back({begin, end, kind, c.operation, c.place.line()});
}

struct OwnedAccess {
    Access access;
    int64_t core;
};

// One core's accesses of one kind, in order and without overlap.
inline void append_merged(const Core& c, Access::Kind kind, std::vector<OwnedAccess>& to) {
    std::vector<Access> chosen;
    std::copy_if(c.accesses.begin(), c.accesses.end(), std::back_inserter(chosen),
                 [&](const Access& a) { return a.kind == kind; });
    std::sort(chosen.begin(), chosen.end(), [](const Access& a, const Access& b) { return a.begin < b.begin; });
    const size_t first = to.size();
    for (const Access& access : chosen) {
        if (to.size() > first && access.begin < to.back().access.end) {
            to.back().access.end = std::max(to.back().access.end, access.end);
        } else {
            to.push_back({access, c.index});
        }
    }
}

inline void report(const OwnedAccess& a, const OwnedAccess& b) {
    const auto told = [](const OwnedAccess& x) {
        return "core " + std::to_string(x.core) + " (" + x.access.operation + ", line " + std::to_string(x.access.line) + ")";
    };
    throw Error("race: " + told(a) + " and " + told(b) + " touch the same " +
                std::to_string(std::min(a.access.end, b.access.end) - std::max(a.access.begin, b.access.begin)) +
                " bytes of global memory without a SyncAll between them, and at least one writes");
}

// Throws if an access in `touching` overlaps with another core's in `changing`, or, if these are `exclusive`, if two cores' do
// there.
inline void compare(const std::vector<OwnedAccess>& changing, const std::vector<OwnedAccess>& touching, bool exclusive) {
    // Of the changes that begin at or before an address: the one that reaches farthest, and the farthest of any other core.
    struct Reach {
        const OwnedAccess *first = nullptr, *second = nullptr;
        void add(const OwnedAccess& x) {
            if (first != nullptr && first->core == x.core) {
                if (x.access.end > first->access.end) first = &x;
            } else if (first == nullptr || x.access.end > first->access.end) {
                second = first;
                first = &x;
            } else if (second == nullptr || x.access.end > second->access.end) {
                second = &x;
            }
        }
        const OwnedAccess* of_others(int64_t core) const { return first != nullptr && first->core == core ? second : first; }
    };
    std::vector<const OwnedAccess*> all;
    for (const auto& x : changing) all.push_back(&x);
    for (const auto& x : touching) all.push_back(&x);
    const OwnedAccess *begin = changing.data(), *end = begin + changing.size();
    const auto changes = [&](const OwnedAccess* x) { return x >= begin && x < end; };
    std::sort(all.begin(), all.end(), [](auto a, auto b) { return a->access.begin < b->access.begin; });
    Reach changed, touched;
    for (const OwnedAccess* x : all) {
        const OwnedAccess* change = exclusive || !changes(x) ? changed.of_others(x->core) : nullptr;
        if (change != nullptr && change->access.end > x->access.begin) report(*change, *x);
        if (changes(x)) {
            const OwnedAccess* touch = touched.of_others(x->core);
            if (touch != nullptr && touch->access.end > x->access.begin) report(*x, *touch);
            changed.add(*x);
        } else {
            touched.add(*x);
        }
    }
}

// Throws if two cores got into each other's way since the last time, and forgets what was recorded.
inline void check_races(std::vector<Core>& cores) {
    std::vector<OwnedAccess> reads, writes, atomics, all;
    for (const Core& c : cores) {
        append_merged(c, Access::Kind::Read, reads);
        append_merged(c, Access::Kind::Write, writes);
        append_merged(c, Access::Kind::Atomic, atomics);
    }
    for (Core& c : cores) c.accesses.clear();
    for (const auto* changes : {&writes, &atomics}) {
        for (const OwnedAccess& x : *changes) {
            for (Core& c : cores) {
                if (c.index != x.core) c.cache->passed_by(x.access.begin, x.access.end, true);
            }
        }
    }
    all = reads;
    all.insert(all.end(), atomics.begin(), atomics.end());
    compare(writes, all, true);
    compare(atomics, reads, false);
}

}  // namespace host
