// Runs a kernel: one thread per core, one barrier for SyncAll. See ../README.md.
#pragma once

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <exception>
#include <mutex>
#include <numeric>
#include <random>
#include <thread>
#include <vector>

#include "cache.h"
#include "core.h"
#include "pipes.h"
#include "races.h"

namespace host {

struct Options {
    // 0: all cores run at once, as the system pleases. Else one core at a time, in an order that this number decides and that
    // changes at every SyncAll: what a launch calculates then is the same whenever it is repeated with the same seed.
    int64_t seed = 0;
    // Whether missing waits between pipes are looked for, see pipes.h. Only what tries something out leaves this off.
    bool pipes = true;
};

// The barrier of a launch, and whose turn it is.
class Schedule {
  public:
    Schedule(std::vector<Core>& cores, const Options& options)
        : cores_(cores),
          in_turn_(options.seed != 0),
          random_(static_cast<uint64_t>(options.seed)),
          wake_(cores.size()),
          ended_(cores.size()),
          order_(cores.size()) {
        std::iota(order_.begin(), order_.end(), 0);
        if (in_turn_) std::shuffle(order_.begin(), order_.end(), random_);
    }

    // The core may run.
    void begin(int64_t core) {
        std::unique_lock lock(mutex_);
        await_turn(core, lock);
    }

    // All cores have come here; throws where one has left already.
    void sync(int64_t core) {
        std::unique_lock lock(mutex_);
        if (left_ > 0) fail("waits for cores that have left: ", left_, " of ", cores_.size());
        const int64_t epoch = epoch_;
        waiting_++;
        if (waiting_ == static_cast<int64_t>(cores_.size())) {
            open();
        } else {
            pass_on();
            wake_[core].wait(lock, [&] { return epoch_ != epoch || failed_; });
        }
        if (failed_) throw Abandoned();
        await_turn(core, lock);
    }

    // The core has left, with an error or without.
    void end(int64_t core, std::exception_ptr error) {
        std::unique_lock lock(mutex_);
        left_++;
        ended_[core] = true;
        if (error == nullptr && waiting_ > 0 && !failed_) {
            Core& c = cores_[core];
            error =
                std::make_exception_ptr(Error("core " + std::to_string(c.index) + " left while " + std::to_string(waiting_) +
                                              " of " + std::to_string(cores_.size()) + " cores wait in SyncAll"));
        }
        if (error != nullptr && !failed_) {
            failed_ = true;
            error_ = error;
            for (auto& waker : wake_) waker.notify_one();
        }
        pass_on();
    }

    void finish() {
        if (error_ != nullptr) std::rethrow_exception(error_);
        check_races(cores_);
    }

    int64_t epochs() const { return epoch_; }

  private:
    void await_turn(int64_t core, std::unique_lock<std::mutex>& lock) {
        if (!in_turn_) return;
        wake_[core].wait(lock, [&] { return failed_ || (turn_ < order_.size() && order_[turn_] == core); });
        if (failed_) throw Abandoned();
    }

    void pass_on() {
        if (!in_turn_) return;
        turn_++;
        if (turn_ < order_.size()) wake_[order_[turn_]].notify_one();
    }

    void open() {
        try {
            check_races(cores_);
        } catch (...) {
            error_ = std::current_exception();
            failed_ = true;
        }
        waiting_ = 0;
        epoch_++;
        turn_ = 0;
        if (in_turn_) std::shuffle(order_.begin(), order_.end(), random_);
        for (auto& waker : wake_) waker.notify_one();
    }

    std::vector<Core>& cores_;
    const bool in_turn_;
    std::mt19937_64 random_;
    std::mutex mutex_;
    std::deque<std::condition_variable> wake_;
    std::vector<bool> ended_;
    std::vector<int64_t> order_;
    size_t turn_ = 0;
    int64_t waiting_ = 0, left_ = 0, epoch_ = 0;
    bool failed_ = false;
    std::exception_ptr error_;
};

// What must hold when a core has run through.
inline void check_end(Core& c) {
    c.operation = "the end of the kernel";
    c.place = Place();
    if (!c.complaint.empty()) throw Error(c.complaint);
    require(c.atomic == nullptr, "SetAtomicNone was not called");
    require(c.pending.empty(), "a product was not waited for");
    require(!c.cache->dirty(),
            "what the scalar unit wrote to global memory is in its cache: DataCacheCleanAndInvalid was not called");
    for (int kind = 0; kind < EVENT_KINDS; kind++) {
        for (int event = 0; event < EVENTS_PER_KIND; event++) {
            require(!c.flags[kind][event], "a flag that was set is not waited for: event ", event, " of kind ", kind);
            require(!c.reserved[kind][event], "an event was not released: event ", event, " of kind ", kind);
        }
    }
    for (const Buffer& buffer : c.buffers) {
        require(buffer.state == Buffer::State::Free || buffer.state == Buffer::State::Released || !buffer.of_queue,
                "a tensor of ", buffer.bytes, " bytes was not freed");
    }
}

// Runs the kernel on that many cores and returns what they did; throws the first error. A core's number goes to the threads in
// order, so that `seed` alone decides who comes first.
template <class Kernel>
Counters launch(int64_t count, Kernel kernel, Options options = {}) {
    if (count < 1) throw Error("a launch needs a core");
    std::vector<Core> cores(static_cast<size_t>(count));
    Schedule schedule(cores, options);
    std::vector<Cache> caches(cores.size());
    std::vector<Pipes> pipes(options.pipes ? cores.size() : 0);
    std::vector<std::thread> threads;
    for (int64_t i = 0; i < count; i++) {
        cores[i].index = i;
        cores[i].count = count;
        cores[i].schedule = &schedule;
        cores[i].cache = &caches[i];
        if (options.pipes) cores[i].pipes = &pipes[i];
        threads.emplace_back([&, i] {
            std::exception_ptr error;
            current = &cores[i];
            try {
                schedule.begin(i);
                kernel();
                check_end(cores[i]);
            } catch (const Abandoned&) {
            } catch (...) {
                error = std::current_exception();
            }
            current = nullptr;
            schedule.end(i, error);
        });
    }
    for (auto& thread : threads) thread.join();
    schedule.finish();
    Counters total;
    for (const Core& c : cores) total.add(c.counters);
    total.barriers = schedule.epochs();
    return total;
}

}  // namespace host

namespace AscendC {

inline int64_t GetBlockIdx() { return host::core().index; }
inline int64_t GetBlockNum() { return host::core().count; }

template <bool isAIVOnly = true>
void SyncAll(HOST_PLACE) {
    host::Core& c = host::enter("SyncAll", place);
    // It waits for all pipes of the core, too.
    if (c.pipes != nullptr) c.pipes->join_all();
    host::require(!c.cache->dirty(),
                  "what the scalar unit wrote to global memory is in its cache: DataCacheCleanAndInvalid comes first");
    c.schedule->sync(c.index);
}

// On the device it interrupts the core; whoever waits for the stream gets an error.
inline void Trap(HOST_PLACE) {
    host::enter("Trap", place);
    host::fail("the kernel stopped itself");
}

}  // namespace AscendC
