// Samples distributed over blocks of rows that fit the cache, and the sum of a block.
#pragma once

#include "samples.h"

namespace turbogr {

constexpr int64_t BLOCK_BYTES = 512 << 10;  // of the table's gradient: half of a large second-level cache
constexpr int64_t MOST_BLOCKS = 2048;       // that many streams are written while the samples are distributed
constexpr int64_t BLOCKS_PER_THREAD = 4;    // where there is more than one: rows are not equally popular
// So many samples are distributed at a time: as few as the cache holds, but enough for each row of a large table to be worth
// the memory traffic of its sum.
constexpr int64_t SAMPLES_AT_ONCE = 1 << 18;
constexpr int64_t SAMPLES_PER_ROW = 4;

// One sample as the sum of a block reads it.
struct Entry {
    uint32_t token, row;  // the row is counted from the block's first
    float weight;
};

// The samples of some tokens, but for lent ones, distributed over blocks of rows.
class Blocks {
  public:
    explicit Blocks(const TurbogrSamples& p) : p_(p), parts_(threads_of(p)), samples_(p.count - p.lent) {
        const int64_t row_bytes = round_up(std::max<int64_t>(p.width, 1), LANES) * static_cast<int64_t>(sizeof(float));
        const int64_t wanted = parts_ == 1 ? 1 : parts_ * BLOCKS_PER_THREAD;
        const auto too_large = [&] { return row_bytes << shift_ > BLOCK_BYTES || p.rows >> shift_ < wanted; };
        while (shift_ > 0 && too_large() && p.rows >> shift_ < MOST_BLOCKS) shift_--;
        count_ = (p.rows >> shift_) + 1;
        const int64_t samples = std::max(SAMPLES_AT_ONCE, p.rows * SAMPLES_PER_ROW);
        tokens_at_once_ = std::clamp<int64_t>(samples / std::max<int64_t>(samples_, 1), 1, std::max<int64_t>(p.tokens, 1));
    }

    bool allocate_scratch() {
        Arena sizes(nullptr);
        take(sizes);
        memory_ = allocate(sizes.used());
        if (!memory_) return false;
        Arena arena(memory_.get());
        take(arena);
        return true;
    }

    int64_t tokens_at_once() const { return tokens_at_once_; }
    int64_t count() const { return count_; }
    int64_t rows() const { return std::min(int64_t{1} << shift_, p_.rows); }
    int64_t first_row(int64_t block) const { return block << shift_; }
    int64_t end_row(int64_t block) const { return std::min((block + 1) << shift_, p_.rows); }
    const Entry* begin(int64_t block) const { return entries_ + starts_[block]; }
    const Entry* end(int64_t block) const { return entries_ + starts_[block + 1]; }

    // Takes the place of the samples before with those of the tokens from `first` on; a sample outside the table is reported.
    void distribute(int64_t first, const float* weights, const float* factors, Wrong& wrong) {
        std::fill_n(places_, parts_ * count_, int64_t{0});
        for_parts(first, [&](int64_t token, int64_t* places) {
            for_samples(p_, token, samples_, wrong, [&](int64_t, int64_t row) { places[row >> shift_]++; });
        });
        int64_t before = 0;
        for (int64_t block = 0; block < count_; block++) {
            starts_[block] = before;
            for (int64_t part = 0; part < parts_; part++) {
                const int64_t in_part = places_[part * count_ + block];
                places_[part * count_ + block] = before;
                before += in_part;
            }
        }
        starts_[count_] = before;
        const int64_t mask = (int64_t{1} << shift_) - 1;
        for_parts(first, [&](int64_t token, int64_t* places) {
            const float factor = factors == nullptr ? 1 : factors[token];
            const float* own = weights + token * samples_;
            for_samples(p_, token, samples_, wrong, [&](int64_t s, int64_t row) {
                Entry& entry = entries_[places[row >> shift_]++];
                entry = {static_cast<uint32_t>(token), static_cast<uint32_t>(row & mask), own[s] * factor};
            });
        });
    }

  private:
    void take(Arena& arena) {
        starts_ = arena.take<int64_t>(count_ + 1);
        places_ = arena.take<int64_t>(parts_ * count_);
        entries_ = arena.take<Entry>(tokens_at_once_ * samples_);
    }

    // Calls run(token, where its part of the tokens counts or writes) for the tokens from `first` on.
    template <typename Run>
    void for_parts(int64_t first, Run run) {
        const int64_t tokens = std::min(tokens_at_once_, p_.tokens - first);
#pragma omp parallel for schedule(static, 1) num_threads(static_cast<int>(parts_))
        for (int64_t part = 0; part < parts_; part++) {
            const int64_t end = first + tokens * (part + 1) / parts_;
            for (int64_t token = first + tokens * part / parts_; token < end; token++) run(token, places_ + part * count_);
        }
    }

    const TurbogrSamples& p_;
    int64_t parts_, samples_, count_ = 0, tokens_at_once_ = 0;
    int shift_ = 31;
    Memory memory_;
    Entry* entries_ = nullptr;
    int64_t *starts_ = nullptr, *places_ = nullptr;
};

// sums[entry's row] += weight * output of the entry's token, for all entries of a block.
static inline void add_entries(const Entry* begin, const Entry* end, const Rows<>& outputs, int64_t stride, float* sums) {
    by_columns(stride / LANES, [&](auto vectors, int64_t first) {
        for (const Entry* entry = begin; entry < end; entry++) {
            const float* from = outputs[entry->token] + first * LANES;
            float* to = sums + entry->row * stride + first * LANES;
            const Vector weight = broadcast(entry->weight);
            Vector next[vectors];
            for (int v = 0; v < vectors; v++) next[v] = load(to + v * LANES) + weight * load(from + v * LANES);
            for (int v = 0; v < vectors; v++) store(to + v * LANES, next[v]);
        }
    });
}

}  // namespace turbogr
