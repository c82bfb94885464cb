// Products of tokens with sampled rows of a table, the sampled softmax on them, and their gradients, on a CPU. Arithmetic is
// float32; the table of plain products may be stored in half precision, and is widened where it is read. The formulas stand in
// turbogr/ops/negative_logits.py and sampled_softmax.py.
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

#include "exponential.h"
#include "matmul.h"
#include "sample_blocks.h"
#include "samples.h"
#include "tasks.h"
#include "vectors.h"

namespace turbogr {
namespace {

// x . rows[0], ..., x . rows[LANES - 1].
template <typename Element>
Vector dots(const float* x, const Element* const* rows, int64_t vectors) {
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
template <typename Element>
void weighted_sum(const float* weights, const Element* const* rows, int64_t count, int64_t width, float* to) {
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
    std::atomic<int64_t> next{0};
#pragma omp parallel for schedule(static, 1) num_threads(threads)
    for (int thread = 0; thread < threads; thread++) {
        auto worker = make(Arena(memory.get() + thread * bytes));
        for (int64_t first = next.fetch_add(TOKENS_AT_ONCE); first < p.tokens; first = next.fetch_add(TOKENS_AT_ONCE))
            for (int64_t token = first; token < std::min(first + TOKENS_AT_ONCE, p.tokens); token++) run(worker, token);
    }
    return true;
}

// The rows of one token and the numbers that belong to them, both up to a whole number of vectors.
template <typename Element = float>
class Token {
  public:
    Token(const TurbogrSamples& p, const Rows<>& outputs, const Rows<Element>& table, Wrong& wrong, Arena arena)
        : p_(p), outputs_(outputs), table_(table), wrong_(wrong), padded_(round_up(p.count, LANES)) {
        rows_ = arena.take<const Element*>(padded_);
        values_ = arena.take<float>(padded_);
        used_ = arena.used();
    }

    int64_t used() const { return used_; }
    float* values() { return values_; }
    int64_t padded() const { return padded_; }

    // Finds the rows of `token`; false if one is outside the table.
    bool find(int64_t token) {
        if (!for_samples(p_, token, p_.count, wrong_, [&](int64_t s, int64_t row) { rows_[s] = table_[row]; })) return false;
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
                __builtin_prefetch(rows_[next] + 64 / sizeof(Element));
            }
            store(values_ + s, dots(outputs_[token], rows_ + s, vectors));
        }
    }

    void add_up(const float* weights, float* to) const { weighted_sum(weights, rows_, p_.count, p_.width, to); }

    // values() hold products, to which temperature * bias is added: it is divided with them.
    void add_bias(int64_t token, float temperature) {
        for_samples(p_, token, p_.count, wrong_, [&](int64_t s, int64_t row) { values_[s] += temperature * p_.bias[row]; });
    }

    // values() = numbers[s] * factor of sample s's row.
    void scale(int64_t token, const float* numbers) {
        for_samples(p_, token, p_.count, wrong_, [&](int64_t s, int64_t row) { values_[s] = numbers[s] * p_.row_factors[row]; });
    }

    // values() hold products and become the loss's derivatives by them; returns the loss.
    float softmax(int64_t token, float temperature) {
        const int64_t target = p_.targets[token];
        const int64_t* index = p_.index + token * (p_.count - 1);
        const float least = -std::numeric_limits<float>::infinity(), factor = 1 / temperature;
        for (int64_t s = 1; s < p_.count; s++)
            if (index[s - 1] == target) values_[s] = least;
        for (int64_t s = p_.count; s < padded_; s++) values_[s] = least;
        const float positive = values_[0];
        values_[0] = least;  // the positive is added last: what the others sum up to must not be rounded away
        Vector lanes = broadcast(least);
        for (int64_t s = 0; s < padded_; s += LANES) lanes = maximum(load(values_ + s), lanes);
        float largest = positive;
        for (int lane = 0; lane < LANES; lane++) largest = std::max(largest, lanes[lane]);
        // The difference first: of scaled products, a compiler that fuses rounds only one, and an exponent may be positive then.
        Vector sums{};
        for (int64_t s = 0; s < padded_; s += LANES) {
            const Vector power = exponential((load(values_ + s) - largest) * factor);
            store(values_ + s, power);
            sums += power;
        }
        const float below = (largest - positive) * factor;
        const float own = std::exp(-below), others = sum(sums), scale = factor / (own + others);
        for (int64_t s = 0; s < padded_; s += LANES) store(values_ + s, load(values_ + s) * scale);
        values_[0] = -others * scale;  // (own / total - 1) * factor
        return below + std::log1p(others + (own - 1));
    }

  private:
    const TurbogrSamples& p_;
    const Rows<>& outputs_;
    const Rows<Element>& table_;
    Wrong& wrong_;
    int64_t padded_, used_;
    const Element** rows_;
    float* values_;
};

template <typename Element>
int negative_logits(const TurbogrSamples& p, float* logits, int64_t* wrong) {
    Rows<> outputs;
    Rows<Element> table;
    if (!prepare_outputs(outputs, p) || !prepare_table(table, p)) return 1;
    Wrong outside;
    const auto make = [&](Arena arena) { return Token<Element>(p, outputs, table, outside, arena); };
    const auto run = [&](Token<Element>& worker, int64_t token) {
        if (p.count == 0 || !worker.find(token)) return;
        worker.multiply(token);
        if (p.row_factors != nullptr) worker.scale(token, worker.values());
        std::copy_n(worker.values(), p.count, logits + token * p.count);
    };
    return for_tokens(p, make, run) ? outside.report(wrong) : 1;
}

template <typename Element>
int weighted_rows(const TurbogrSamples& p, const float* weights, float* sums, int64_t* wrong) {
    Rows<> outputs;
    Rows<Element> table;
    if (!prepare_table(table, p)) return 1;
    Wrong outside;
    const auto make = [&](Arena arena) { return Token<Element>(p, outputs, table, outside, arena); };
    const auto run = [&](Token<Element>& worker, int64_t token) {
        if (!worker.find(token)) return;
        const float* own = weights + token * p.count;
        if (p.row_factors != nullptr) worker.scale(token, own), own = worker.values();
        worker.add_up(own, sums + token * p.width);
    };
    return for_tokens(p, make, run) ? outside.report(wrong) : 1;
}

}  // namespace
}  // namespace turbogr

using namespace turbogr;

int turbogr_negative_logits(const TurbogrSamples* samples, float* logits, int64_t* wrong) {
    const TurbogrSamples& p = *samples;
    return with_type(p, [&](auto type) { return negative_logits<decltype(type)>(p, logits, wrong); });
}

int turbogr_sampled_softmax(
    const TurbogrSamples* samples, float temperature, float* loss, float* coefficients, float* direction, int64_t* wrong
) {
    const TurbogrSamples& p = *samples;
    Rows<> outputs, table;
    if (!prepare_outputs(outputs, p) || !prepare_table(table, p)) return 1;
    Wrong outside;
    const auto make = [&](Arena arena) { return Token<>(p, outputs, table, outside, arena); };
    const auto run = [&](Token<>& worker, int64_t token) {
        if (!worker.find(token)) return;
        worker.multiply(token);
        if (p.bias != nullptr) worker.add_bias(token, temperature);
        loss[token] = worker.softmax(token, temperature);
        std::copy_n(worker.values(), p.count - p.lent, coefficients + token * (p.count - p.lent));
        worker.add_up(worker.values(), direction + token * p.width);
    };
    return for_tokens(p, make, run) ? outside.report(wrong) : 1;
}

int turbogr_weighted_rows(const TurbogrSamples* samples, const float* weights, float* sums, int64_t* wrong) {
    const TurbogrSamples& p = *samples;
    return with_type(p, [&](auto type) { return weighted_rows<decltype(type)>(p, weights, sums, wrong); });
}

int turbogr_row_sums(const TurbogrSamples* samples, const float* weights, const float* factors, float* sums, int64_t* wrong) {
    const TurbogrSamples& p = *samples;
    const int threads = static_cast<int>(threads_of(p));
    Rows<> outputs;
    if (!prepare_outputs(outputs, p)) return 1;
    Blocks blocks(p);
    const int64_t stride = round_up(p.width, LANES), bytes = blocks.rows() * stride * static_cast<int64_t>(sizeof(float));
    const bool apart = stride != p.width;  // then a block is summed in scratch with whole vectors, and copied
    const Memory scratch = allocate(apart ? threads * bytes : 0);
    if (!scratch || !blocks.allocate_scratch()) return 1;
    Wrong outside;
    // At least once, so that sums of no tokens are written too.
    for (int64_t first = 0; first == 0 || first < p.tokens; first += blocks.tokens_at_once()) {
        blocks.distribute(first, weights, factors, outside);
        if (outside.report(wrong) != 0) return 2;
        std::atomic<int64_t> next{0};
#pragma omp parallel for schedule(static, 1) num_threads(threads)
        for (int thread = 0; thread < threads; thread++) {
            float* own = reinterpret_cast<float*>(scratch.get() + thread * bytes);
            for (int64_t block = next++; block < blocks.count(); block = next++) {
                const int64_t first_row = blocks.first_row(block), rows = blocks.end_row(block) - first_row;
                float* result = sums + first_row * p.width;
                float* to = apart ? own : result;
                if (first == 0) std::fill_n(to, rows * stride, 0.0f);
                else if (apart) pack(result, p.width, rows, p.width, 1, own, stride, rows);
                add_entries(blocks.begin(block), blocks.end(block), outputs, stride, to);
                if (apart) unpack(own, stride, rows, p.width, 1, result, p.width);
            }
        }
    }
    return 0;
}
