// Which pipe waits for which. The scalar unit only issues what the vector unit and the two copy engines do; these run one
// beside the other, and what one of them needs of another must be waited for: by EnQue and DeQue, FreeTensor and AllocTensor,
// SetFlag and WaitFlag, PipeBarrier or SyncAll. The stand-in does everything in the order of the program, so a kernel that
// forgot to wait would calculate rightly here; this follows what each pipe knows to be done, and throws where memory is touched
// without that knowledge.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <map>

#include "core.h"

namespace host {

enum class Pipe { S, V, MTE2, MTE3 };
inline constexpr int PIPES = 4;

inline Pipe pipe_of(Unit unit) {
    switch (unit) {
        case Unit::CopyIn: return Pipe::MTE2;
        case Unit::CopyOut: return Pipe::MTE3;
        case Unit::Vector:
        case Unit::Element: return Pipe::V;
        default: return Pipe::S;
    }
}
inline constexpr const char* PIPE_NAMES[PIPES] = {"S", "V", "MTE2", "MTE3"};

// By pipe: how many of its instructions are known to be done.
using Clock = std::array<int64_t, PIPES>;

inline void advance(Clock& clock, const Clock& to) {
    for (int p = 0; p < PIPES; p++) clock[p] = std::max(clock[p], to[p]);
}

class Pipes {
  public:
    using Kind = Access::Kind;

    // What whoever waits for `pipe` now will know.
    Clock snapshot(Pipe pipe) const {
        Clock clock = known_[index(pipe)];
        clock[index(pipe)] = issued_[index(pipe)];
        return clock;
    }
    void join(Pipe pipe, const Clock& clock) {
        // What the scalar unit waited for is done before it issues anything else, to whichever pipe.
        if (pipe == Pipe::S) {
            for (Clock& known : known_) advance(known, clock);
        }
        advance(known_[index(pipe)], clock);
    }
    void set(int kind, int event, Pipe from) { flags_[kind][event] = snapshot(from); }
    void wait(int kind, int event, Pipe to) { join(to, flags_[kind][event]); }
    // Everything that was issued is done.
    void join_all() {
        known_.fill(issued_);
        for (auto& of_pipe : touched_) {
            for (Touched& touched : of_pipe) touched = Touched();
        }
    }
    // Copies of one engine may overtake each other as far as memory is concerned.
    void barrier(Pipe pipe) { known_[index(pipe)][index(pipe)] = issued_[index(pipe)]; }

    // The next instruction of `pipe` touches the bytes [begin, end), of local memory by its offset, of global memory by its
    // address.
    void touch(Pipe pipe, Kind kind, uintptr_t begin, uintptr_t end) {
        if (begin == end) return;
        check(pipe, kind, begin, end);
        const int64_t time = ++issued_[index(pipe)];
        // A number that the scalar unit read is there: it went on with it.
        if (pipe != Pipe::S || kind != Kind::Read) touched_[index(pipe)][static_cast<int>(kind)].add(begin, end, time);
    }
    // Throws if what the pipe is to touch may still be in use by another.
    void check(Pipe pipe, Kind kind, uintptr_t begin, uintptr_t end) const {
        const Clock& known = known_[index(pipe)];
        for (int other = 0; other < PIPES; other++) {
            const bool in_order = other == index(pipe) && (pipe == Pipe::S || pipe == Pipe::V);
            if (in_order) continue;
            for (int k = 0; k < 3; k++) {
                const bool harmless = kind == static_cast<Kind>(k) && kind != Kind::Write;
                const Touched& touched = touched_[other][k];
                if (harmless || touched.latest <= known[other]) continue;
                require(touched.latest_in(begin, end) <= known[other], VERBS[static_cast<int>(kind)], " memory that ",
                        PIPE_NAMES[other], " may still be ", GERUNDS[k], ": pipe ", PIPE_NAMES[index(pipe)],
                        " has not waited for it");
            }
        }
    }

  private:
    static constexpr const char* VERBS[3] = {"reads", "writes", "adds to"};
    static constexpr const char* GERUNDS[3] = {"reading", "writing", "adding to"};

    // When bytes were last touched: disjoint intervals, by their beginning.
    struct Touched {
        struct Interval {
            uintptr_t end;
            int64_t time;
        };
        std::map<uintptr_t, Interval> intervals;
        int64_t latest = 0;

        // The first interval that ends behind `begin`.
        auto first(uintptr_t begin) const {
            auto it = intervals.upper_bound(begin);
            if (it != intervals.begin() && std::prev(it)->second.end > begin) --it;
            return it;
        }
        int64_t latest_in(uintptr_t begin, uintptr_t end) const {
            int64_t time = 0;
            for (auto it = first(begin); it != intervals.end() && it->first < end; ++it) time = std::max(time, it->second.time);
            return time;
        }
        void add(uintptr_t begin, uintptr_t end, int64_t time) {
            latest = time;
            if (auto same = intervals.find(begin); same != intervals.end() && same->second.end == end) {
                same->second.time = time;
                return;
            }
            auto it = intervals.lower_bound(first(begin) == intervals.end() ? end : first(begin)->first);
            while (it != intervals.end() && it->first < end) {
                const uintptr_t old_begin = it->first;
                const Interval old = it->second;
                it = intervals.erase(it);
                if (old_begin < begin) intervals[old_begin] = {begin, old.time};
                if (old.end > end) intervals[end] = old;
            }
            intervals[begin] = {end, time};
        }
    };

    static constexpr int index(Pipe pipe) { return static_cast<int>(pipe); }

    std::array<Clock, PIPES> known_{};
    Clock issued_{};
    Clock flags_[EVENT_KINDS][EVENTS_PER_KIND] = {};
    std::array<std::array<Touched, 3>, PIPES> touched_;
};

}  // namespace host
