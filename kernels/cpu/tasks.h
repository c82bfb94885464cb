// The work on a jagged batch: one task per sequence and some of its heads, taken from a queue, the longest first.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <memory>
#include <new>

#include "vectors.h"

namespace turbogr {

constexpr int TILE = 64;  // rows and columns of a tile of scores

// Heads are taken together, so that they share the work on the bias, while their tokens are so few and a task is no more than
// half of the batch. The number of threads has no say: it would change the order of sums.
constexpr int64_t TOKENS_PER_TASK = 8192;

struct Free {
    void operator()(void* memory) const { std::free(memory); }
};
using Memory = std::unique_ptr<char, Free>;

constexpr int64_t PAGE = 4096;

static inline Memory allocate(int64_t bytes) {
    void* memory = nullptr;
    if (posix_memalign(&memory, static_cast<size_t>(bytes < PAGE ? 64 : PAGE), static_cast<size_t>(std::max<int64_t>(bytes, 64))) != 0) return nullptr;
    return Memory(static_cast<char*>(memory));
}

// Hands out aligned pieces of one block; with a null block it only counts. Large pieces begin on pages: processors compare the
// low 12 bits of addresses first, and a load that agrees in them with a store shortly before waits for it. Loops that read and
// write the same places of several pieces have no such pairs then.
class Arena {
  public:
    explicit Arena(char* block) : block_(block) {}
    template <typename T>
    T* take(int64_t count) {
        const int64_t bytes = count * static_cast<int64_t>(sizeof(T));
        used_ = round_up(used_, bytes < PAGE ? 64 : PAGE);
        T* piece = block_ == nullptr ? nullptr : reinterpret_cast<T*>(block_ + used_);
        used_ += bytes;
        return piece;
    }
    int64_t used() const { return used_; }

  private:
    char* block_;
    int64_t used_ = 0;
};

struct Task {
    int64_t first_token, length, first_head, heads;
};

// Tasks in the order of the batch, and the order in which they are worked on.
struct Queue {
    std::unique_ptr<Task[]> tasks;
    std::unique_ptr<int64_t[]> order;
    int64_t count = 0, longest = 0;

    bool build(const int64_t* offsets, int64_t sequences, int64_t heads) {
        if (sequences < 1 || heads < 1) return true;  // no work: the count stays 0
        const int64_t most = sequences * heads;
        tasks.reset(new (std::nothrow) Task[static_cast<size_t>(most)]);
        order.reset(new (std::nothrow) int64_t[static_cast<size_t>(most)]);
        if (!tasks || !order) return false;
        double all = 0;
        for (int64_t b = 0; b < sequences; b++) all += pairs(offsets[b + 1] - offsets[b], heads);
        for (int64_t b = 0; b < sequences; b++) {
            const int64_t length = offsets[b + 1] - offsets[b];
            if (length == 0) continue;
            longest = std::max(longest, length);
            const int64_t half = static_cast<int64_t>(all / 2 / pairs(length, 1));
            const int64_t most_together = std::clamp<int64_t>(std::min(half, TOKENS_PER_TASK / length), 1, heads);
            const int64_t groups = (heads + most_together - 1) / most_together;
            const int64_t together = (heads + groups - 1) / groups;  // groups of nearly equal size
            for (int64_t h = 0; h < heads; h += together) {
                tasks[count] = {offsets[b], length, h, std::min(together, heads - h)};
                order[count] = count;
                count++;
            }
        }
        const auto cost = [&](int64_t t) { return pairs(tasks[t].length, tasks[t].heads); };
        std::sort(order.get(), order.get() + count, [&](int64_t a, int64_t b) {
            return cost(a) != cost(b) ? cost(a) > cost(b) : a < b;
        });
        return true;
    }

    static double pairs(int64_t length, int64_t heads) {
        return static_cast<double>(length) * static_cast<double>(length) * static_cast<double>(heads);
    }

    // Tokens times heads of the largest task, each sequence rounded up to whole tiles.
    int64_t most_tokens() const {
        int64_t most = 0;
        for (int64_t t = 0; t < count; t++) most = std::max(most, tasks[t].heads * round_up(tasks[t].length, TILE));
        return most;
    }
};

// Runs every task on its thread's worker; false if a thread found no memory. `make` builds a worker on an arena, `run` uses it.
template <typename Make, typename Run>
bool work(const Queue& queue, int64_t wanted_threads, Make make, Run run) {
    const int64_t bytes = make(Arena(nullptr)).used();
    const int threads = static_cast<int>(std::clamp<int64_t>(wanted_threads, 1, std::max<int64_t>(queue.count, 1)));
    std::atomic<bool> failed{false};
#pragma omp parallel num_threads(threads)
    {
        const Memory memory = allocate(bytes);
        auto worker = make(Arena(memory.get()));
        if (!memory) failed = true;
#pragma omp for schedule(dynamic, 1)
        for (int64_t x = 0; x < queue.count; x++)
            if (memory) run(worker, queue.order[x]);
    }
    return !failed;
}

}  // namespace turbogr
