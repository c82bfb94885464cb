// Products of tokens with sampled rows of a table, the sampled softmax on them, and their gradients; float32 on a CPU. The
// formulas stand in turbogr/ops/negative_logits.py and sampled_softmax.py.
//
// Forward works token by token: the rows of a token are read where they lie, LANES of them at once, and are in the cache still
// when they are added up with their weights. The gradient of the table is summed by blocks of rows that fit the cache: samples
// are first distributed over the blocks, in the order of the tokens, then each block is summed by one thread in that order. So
// no result depends on the number of threads.

#include "negative_logits.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#include <type_traits>

#include "exponential.h"
#include "matmul.h"
#include "tasks.h"
#include "vectors.h"

namespace turbogr {
namespace {

constexpr int64_t BLOCK_BYTES = 512 << 10;  // of the table's gradient: half of a large second-level cache
constexpr int64_t MOST_BLOCKS = 2048;       // that many streams are written while the samples are distributed
constexpr int64_t BLOCKS_PER_THREAD = 4;    // where there is more than one: rows are not equally popular
constexpr int64_t TOKENS_PER_THREAD = 16;   // fewer are done before another thread has woken up

int64_t threads_of(const TurbogrSamples& p) {
    return std::clamp<int64_t>(p.threads, 1, std::max<int64_t>(p.tokens / TOKENS_PER_THREAD, 1));
}

// Rows whose width is a whole number of vectors: the caller's, or a copy.
struct Rows {
    const float* data = nullptr;
    int64_t stride = 0;
    Memory copy;

    const float* operator[](int64_t row) const { return data + row * stride; }

    bool prepare(const float* from, int64_t from_stride, int64_t rows, int64_t width, int64_t threads) {
        data = from;
        stride = from_stride;
        if (width % LANES == 0) return true;
        stride = round_up(width, LANES);
        copy = allocate(rows * stride * static_cast<int64_t>(sizeof(float)));
        if (!copy) return false;
        float* to = reinterpret_cast<float*>(copy.get());
        data = to;
#pragma omp parallel for schedule(static) num_threads(static_cast<int>(threads))
        for (int64_t row = 0; row < rows; row++)
            pack(from + row * from_stride, from_stride, 1, width, 1, to + row * stride, stride, 1);
        return true;
    }
};

// The first sample that is outside the table.
class Wrong {
  public:
    void at(int64_t sample) {
        int64_t known = first_;
        while (sample < known && !first_.compare_exchange_weak(known, sample)) {}
    }
    int report(int64_t* to) const {
        *to = first_;
        return first_ == NONE ? 0 : 2;
    }

  private:
    static constexpr int64_t NONE = std::numeric_limits<int64_t>::max();
    std::atomic<int64_t> first_{NONE};
};

// Calls use(sample, row) for the samples of a token; false if one is outside.
template <typename Use>
bool for_samples(const TurbogrSamples& p, int64_t token, Wrong& wrong, Use use) {
    const int64_t first = p.targets == nullptr ? 0 : 1;
    const int64_t* index = p.index + token * (p.count - first);
    const uint64_t rows = static_cast<uint64_t>(p.rows);
    if (first == 1) {
        if (static_cast<uint64_t>(p.targets[token]) >= rows) return wrong.at(token * p.count), false;
        use(0, p.targets[token]);
    }
    for (int64_t s = first; s < p.count; s++) {
        const int64_t row = index[s - first];
        if (static_cast<uint64_t>(row) >= rows) return wrong.at(token * p.count + s), false;
        use(s, row);
    }
    return true;
}

// Calls body(number of vectors, first vector) for pieces of at most eight vectors; the number is a constant.
template <typename Body>
void by_columns(int64_t vectors, Body body) {
    int64_t v = 0;
    for (; v + 8 <= vectors; v += 8) body(std::integral_constant<int, 8>{}, v);
    switch (vectors - v) {
        case 1: return body(std::integral_constant<int, 1>{}, v);
        case 2: return body(std::integral_constant<int, 2>{}, v);
        case 3: return body(std::integral_constant<int, 3>{}, v);
        case 4: return body(std::integral_constant<int, 4>{}, v);
        case 5: return body(std::integral_constant<int, 5>{}, v);
        case 6: return body(std::integral_constant<int, 6>{}, v);
        case 7: return body(std::integral_constant<int, 7>{}, v);
        default: return;
    }
}

// x . rows[0], ..., x . rows[LANES - 1].
Vector dots(const float* x, const float* const* rows, int64_t vectors) {
    Vector sums[LANES] = {};
    for (int64_t v = 0; v < vectors; v++) {
        const Vector part = load(x + v * LANES);
#pragma GCC unroll 16
        for (int s = 0; s < LANES; s++) sums[s] += part * load(rows[s] + v * LANES);
    }
    // Each step adds the halves of two vectors and interleaves the results.
#pragma GCC unroll 4
    for (int half = LANES / 2; half > 0; half /= 2)
#pragma GCC unroll 8
        for (int s = 0; s < half; s++) {
            Vector low, high;
            interleave(sums[s], sums[s + half], low, high);
            sums[s] = low + high;
        }
    return sums[0];
}

// to = sum of weights[s] * rows[s], `width` floats.
void weighted_sum(const float* weights, const float* const* rows, int64_t count, int64_t width, float* to) {
    by_columns((width + LANES - 1) / LANES, [&](auto vectors, int64_t first) {
        Vector sums[vectors] = {};
        for (int64_t s = 0; s < count; s++) {
            const Vector weight = broadcast(weights[s]);
            for (int v = 0; v < vectors; v++) sums[v] += weight * load(rows[s] + (first + v) * LANES);
        }
        for (int v = 0; v < vectors; v++) {
            const int64_t column = (first + v) * LANES;
            if (column + LANES <= width) store(to + column, sums[v]);
            else for (int64_t c = column; c < width; c++) to[c] = sums[v][c - column];
        }
    });
}

// Runs `run(worker, token)` for all tokens, with a worker made on each thread's part of one allocation.
template <typename Make, typename Run>
bool for_tokens(const TurbogrSamples& p, Make make, Run run) {
    const int threads = static_cast<int>(threads_of(p));
    const int64_t bytes = round_up(make(Arena(nullptr)).used(), 64);
    const Memory memory = allocate(bytes * threads);
    if (!memory) return false;
#pragma omp parallel for schedule(static, 1) num_threads(threads)
    for (int thread = 0; thread < threads; thread++) {
        auto worker = make(Arena(memory.get() + thread * bytes));
        const int64_t end = p.tokens * (thread + 1) / threads;
        for (int64_t token = p.tokens * thread / threads; token < end; token++) run(worker, token);
    }
    return true;
}

// The rows of one token and the numbers that belong to them, both up to a whole number of vectors.
class Token {
  public:
    Token(const TurbogrSamples& p, const Rows& outputs, const Rows& table, Wrong& wrong, Arena arena)
        : p_(p), outputs_(outputs), table_(table), wrong_(wrong), padded_(round_up(p.count, LANES)) {
        rows_ = arena.take<const float*>(padded_);
        values_ = arena.take<float>(padded_);
        used_ = arena.used();
    }

    int64_t used() const { return used_; }
    float* values() { return values_; }
    int64_t padded() const { return padded_; }

    // Finds the rows of `token`; false if one is outside the table.
    bool find(int64_t token) {
        if (!for_samples(p_, token, wrong_, [&](int64_t s, int64_t row) { rows_[s] = table_[row]; })) return false;
        for (int64_t s = p_.count; s < padded_; s++) rows_[s] = rows_[0];
        return true;
    }

    // values() become the products with the token's output; those behind the last sample repeat the first.
    void multiply(int64_t token) {
        const int64_t vectors = (p_.width + LANES - 1) / LANES;
        for (int64_t s = 0; s < padded_; s += LANES) {
            // A large table lies in memory: the next rows are asked for now, of which the processor guesses the rest.
            for (int64_t next = s + LANES; next < std::min(s + 2 * LANES, padded_); next++) {
                __builtin_prefetch(rows_[next]);
                __builtin_prefetch(rows_[next] + 64 / sizeof(float));
            }
            store(values_ + s, dots(outputs_[token], rows_ + s, vectors));
        }
    }

    void add_up(const float* weights, float* to) const { weighted_sum(weights, rows_, p_.count, p_.width, to); }

    // values() hold products and become the loss's derivatives by them; returns the loss.
    float softmax(int64_t token, float temperature) {
        const int64_t target = p_.targets[token];
        const int64_t* index = p_.index + token * (p_.count - 1);
        const float least = -std::numeric_limits<float>::infinity(), factor = 1 / temperature;
        for (int64_t s = 1; s < p_.count; s++)
            if (index[s - 1] == target) values_[s] = least;
        for (int64_t s = p_.count; s < padded_; s++) values_[s] = least;
        const float positive = values_[0] * factor;
        values_[0] = least;  // the positive is added last: what the others sum up to must not be rounded away
        Vector lanes = broadcast(least);
        for (int64_t s = 0; s < padded_; s += LANES) lanes = maximum(load(values_ + s), lanes);
        float largest = lanes[0];
        for (int lane = 1; lane < LANES; lane++) largest = std::max(largest, lanes[lane]);
        largest = std::max(largest * factor, positive);
        Vector sums{};
        for (int64_t s = 0; s < padded_; s += LANES) {
            const Vector power = exponential(load(values_ + s) * factor - largest);
            store(values_ + s, power);
            sums += power;
        }
        const float own = std::exp(positive - largest), others = sum(sums), scale = factor / (own + others);
        for (int64_t s = 0; s < padded_; s += LANES) store(values_ + s, load(values_ + s) * scale);
        values_[0] = -others * scale;  // (own / total - 1) * factor
        return (largest - positive) + std::log1p(others + (own - 1));
    }

  private:
    const TurbogrSamples& p_;
    const Rows &outputs_, &table_;
    Wrong& wrong_;
    int64_t padded_, used_;
    const float** rows_;
    float* values_;
};

// One sample as the sum of a block reads it.
struct Entry {
    uint32_t token, row;  // the row is counted from the block's first
    float weight;
};

// Samples distributed over blocks of rows.
class Blocks {
  public:
    explicit Blocks(const TurbogrSamples& p) : p_(p), parts_(threads_of(p)) {
        const int64_t row_bytes = round_up(std::max<int64_t>(p.width, 1), LANES) * static_cast<int64_t>(sizeof(float));
        const int64_t wanted = parts_ == 1 ? 1 : parts_ * BLOCKS_PER_THREAD;
        const auto too_large = [&] { return row_bytes << shift_ > BLOCK_BYTES || p.rows >> shift_ < wanted; };
        while (shift_ > 0 && too_large() && p.rows >> shift_ < MOST_BLOCKS) shift_--;
        count_ = (p.rows >> shift_) + 1;
    }

    int64_t count() const { return count_; }
    int64_t rows() const { return std::min(int64_t{1} << shift_, p_.rows); }
    int64_t first_row(int64_t block) const { return block << shift_; }
    int64_t end_row(int64_t block) const { return std::min((block + 1) << shift_, p_.rows); }
    const Entry* begin(int64_t block) const { return entries_ + starts_[block]; }
    const Entry* end(int64_t block) const { return entries_ + starts_[block + 1]; }

    // 0, 1 or 2 as the functions of the interface.
    int distribute(const float* weights, const float* factors, int64_t* first_wrong) {
        const int64_t samples = p_.tokens * p_.count;
        Arena sizes(nullptr);
        take(sizes, samples);
        memory_ = allocate(sizes.used());
        if (!memory_) return 1;
        Arena arena(memory_.get());
        take(arena, samples);
        Wrong wrong;
        for_parts([&](int64_t token, int64_t* places) {
            for_samples(p_, token, wrong, [&](int64_t, int64_t row) { places[row >> shift_]++; });
        });
        if (wrong.report(first_wrong) != 0) return 2;
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
        for_parts([&](int64_t token, int64_t* places) {
            const float factor = factors == nullptr ? 1 : factors[token];
            const float* own = weights + token * p_.count;
            for_samples(p_, token, wrong, [&](int64_t s, int64_t row) {
                Entry& entry = entries_[places[row >> shift_]++];
                entry = {static_cast<uint32_t>(token), static_cast<uint32_t>(row & mask), own[s] * factor};
            });
        });
        return 0;
    }

  private:
    void take(Arena& arena, int64_t samples) {
        starts_ = arena.take<int64_t>(count_ + 1);
        places_ = arena.take<int64_t>(parts_ * count_);
        entries_ = arena.take<Entry>(samples);
        if (places_ != nullptr) std::fill_n(places_, parts_ * count_, int64_t{0});
    }

    // Calls run(token, where the part of tokens counts or writes) for all tokens.
    template <typename Run>
    void for_parts(Run run) {
#pragma omp parallel for schedule(static, 1) num_threads(static_cast<int>(parts_))
        for (int64_t part = 0; part < parts_; part++)
            for (int64_t token = p_.tokens * part / parts_; token < p_.tokens * (part + 1) / parts_; token++)
                run(token, places_ + part * count_);
    }

    const TurbogrSamples& p_;
    int64_t parts_, count_ = 0;
    int shift_ = 31;
    Memory memory_;
    Entry* entries_ = nullptr;
    int64_t *starts_ = nullptr, *places_ = nullptr;
};

// sums[entry's row] += weight * output of the entry's token, for all entries of a block.
void add_entries(const Entry* begin, const Entry* end, const Rows& outputs, int64_t stride, float* sums) {
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

}  // namespace
}  // namespace turbogr

using namespace turbogr;

int turbogr_negative_logits(const TurbogrSamples* samples, float* logits, int64_t* wrong) {
    const TurbogrSamples& p = *samples;
    Rows outputs, table;
    const int64_t threads = threads_of(p);
    if (!outputs.prepare(p.output, p.output_row, p.tokens, p.width, threads)) return 1;
    if (!table.prepare(p.table, p.table_row, p.rows, p.width, threads)) return 1;
    Wrong outside;
    const auto make = [&](Arena arena) { return Token(p, outputs, table, outside, arena); };
    const auto run = [&](Token& worker, int64_t token) {
        if (p.count == 0 || !worker.find(token)) return;
        worker.multiply(token);
        std::copy_n(worker.values(), p.count, logits + token * p.count);
    };
    return for_tokens(p, make, run) ? outside.report(wrong) : 1;
}

int turbogr_sampled_softmax(
    const TurbogrSamples* samples, float temperature, float* loss, float* coefficients, float* direction, int64_t* wrong
) {
    const TurbogrSamples& p = *samples;
    Rows outputs, table;
    const int64_t threads = threads_of(p);
    if (!outputs.prepare(p.output, p.output_row, p.tokens, p.width, threads)) return 1;
    if (!table.prepare(p.table, p.table_row, p.rows, p.width, threads)) return 1;
    Wrong outside;
    const auto make = [&](Arena arena) { return Token(p, outputs, table, outside, arena); };
    const auto run = [&](Token& worker, int64_t token) {
        if (!worker.find(token)) return;
        worker.multiply(token);
        loss[token] = worker.softmax(token, temperature);
        std::copy_n(worker.values(), p.count, coefficients + token * p.count);
        worker.add_up(worker.values(), direction + token * p.width);
    };
    return for_tokens(p, make, run) ? outside.report(wrong) : 1;
}

int turbogr_weighted_rows(const TurbogrSamples* samples, const float* weights, float* sums, int64_t* wrong) {
    const TurbogrSamples& p = *samples;
    Rows outputs, table;
    if (!table.prepare(p.table, p.table_row, p.rows, p.width, threads_of(p))) return 1;
    Wrong outside;
    const auto make = [&](Arena arena) { return Token(p, outputs, table, outside, arena); };
    const auto run = [&](Token& worker, int64_t token) {
        if (worker.find(token)) worker.add_up(weights + token * p.count, sums + token * p.width);
    };
    return for_tokens(p, make, run) ? outside.report(wrong) : 1;
}

int turbogr_row_sums(const TurbogrSamples* samples, const float* weights, const float* factors, float* sums, int64_t* wrong) {
    const TurbogrSamples& p = *samples;
    if (p.tokens > std::numeric_limits<uint32_t>::max()) return 1;
    const int threads = static_cast<int>(threads_of(p));
    Rows outputs;
    if (!outputs.prepare(p.output, p.output_row, p.tokens, p.width, threads)) return 1;
    Blocks blocks(p);
    const int code = blocks.distribute(weights, factors, wrong);
    if (code != 0) return code;
    const int64_t stride = round_up(p.width, LANES), bytes = blocks.rows() * stride * static_cast<int64_t>(sizeof(float));
    const bool apart = stride != p.width;  // then a block is summed in scratch with whole vectors, and copied
    const Memory scratch = allocate(apart ? threads * bytes : 0);
    if (!scratch) return 1;
    std::atomic<int64_t> next{0};
#pragma omp parallel for schedule(static, 1) num_threads(threads)
    for (int thread = 0; thread < threads; thread++) {
        float* own = reinterpret_cast<float*>(scratch.get() + thread * bytes);
        for (int64_t block = next++; block < blocks.count(); block = next++) {
            const int64_t first = blocks.first_row(block), rows = blocks.end_row(block) - first;
            float* result = sums + first * p.width;
            float* to = apart ? own : result;
            std::fill_n(to, rows * stride, 0.0f);
            add_entries(blocks.begin(block), blocks.end(block), outputs, stride, to);
            if (apart) unpack(own, stride, rows, p.width, 1, result, p.width);
        }
    }
    return 0;
}
