// Causal softmax attention on jagged tensors, forward and backward, float32 on a CPU. The formula stands in
// turbogr/ops/softmax_attention.py.
//
// Tasks and tiles are those of hstu_attention.cpp. Forward keeps the largest score of each row so far and the sum of exp(score -
// largest); when a tile raises the largest, what has been summed up is scaled down (Milakov and Gimelshein 2018, "Online
// normalizer calculation for softmax"). Backward computes the scores again and needs one pass, because forward left each row's
// log of the sum (Dao et al. 2022, "FlashAttention"). Every sum has a fixed order: threads do not change a bit.

#include "softmax_attention.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "exponential.h"
#include "tasks.h"
#include "tiles.h"
#include "vectors.h"

namespace turbogr {
namespace {

constexpr float INFINITE = std::numeric_limits<float>::infinity();

struct Shared {
    const TurbogrSoftmax& p;
    Queue queue;

    explicit Shared(const TurbogrSoftmax& problem) : p(problem) {}
    bool build() { return queue.build(p.offsets, p.sequences, p.heads); }

    Heads<const float> q() const { return {p.q, p.q_row, p.q_head, p.qk_width}; }
    Heads<const float> k() const { return {p.k, p.k_row, p.k_head, p.qk_width}; }
    Heads<const float> v() const { return {p.v, p.v_row, p.v_head, p.v_width}; }
};

// Each row of partial [LANES rows, LANES] reduced to one lane of the result: a transposition, then whole vectors.
template <typename Reduce>
static inline Vector reduce_rows(const float* partial, const Reduce& reduce) {
    alignas(64) float columns[LANES * LANES];
    transpose(partial, LANES, LANES, LANES, columns, LANES);
    Vector result = load(columns);
    for (int lane = 1; lane < LANES; lane++) result = reduce(result, load(columns + lane * LANES));
    return result;
}

// The largest of a row's first `limit` scores, lane by lane. A NaN may get lost: its own exponential hands it on.
static inline Vector largest_of(const float* row, int64_t limit) {
    Vector largest = broadcast(-INFINITE);
    int64_t j = 0;
    for (; j + LANES <= limit; j += LANES) largest = maximum(largest, load(row + j));
    if (j < limit) {
        const Vector rest = lane_numbers() < static_cast<int32_t>(limit - j) ? load(row + j) : broadcast(-INFINITE);
        largest = maximum(largest, rest);
    }
    return largest;
}

class Forward {
  public:
    Forward(const Shared& shared, const TurbogrSoftmaxResult& result, Arena arena)
        : shared_(shared), p_(shared.p), result_(result), qk_(padded(p_.qk_width)), v_(padded(p_.v_width)) {
        const int64_t longest = round_up(shared.queue.longest, TILE);
        queries_ = arena.take<float>(longest * qk_);
        keys_ = arena.take<float>(longest * qk_);
        transposed_keys_ = arena.take<float>(longest * qk_);
        values_ = arena.take<float>(longest * v_);
        out_ = arena.take<float>(TILE * v_);
        scores_ = arena.take<float>(TILE * TILE);
        partial_ = arena.take<float>(TILE * LANES);
        largest_ = arena.take<float>(TILE);
        factors_ = arena.take<float>(TILE);
        sums_ = arena.take<float>(TILE);
        used_ = arena.used();
    }

    int64_t used() const { return used_; }

    void run(const Task& task) {
        for (int64_t h = 0; h < task.heads; h++) {
            pack_head(shared_.q(), task, h, p_.scale, queries_, task.length);
            pack_head(shared_.k(), task, h, 1, keys_, padded(task.length));
            pack_transposed(keys_, task.length, p_.qk_width, transposed_keys_);
            pack_head(shared_.v(), task, h, 1, values_, task.length);
            for (int64_t i = 0; i < task.length; i += TILE) rows_of_head(task, h, i);
        }
    }

  private:
    void rows_of_head(const Task& task, int64_t h, int64_t i) {
        const int64_t rows = std::min<int64_t>(TILE, task.length - i);
        std::fill_n(largest_, TILE, -INFINITE);
        std::fill_n(sums_, TILE, 0.0f);
        for (int64_t j = 0; j <= i; j += TILE) {
            const Tile tile{i, rows, j, std::min<int64_t>(TILE, task.length - j)};
            scores(tile, p_.qk_width, queries_, transposed_keys_, scores_);
            raise_largest(tile);
            if (j > 0) scale_down(rows);
            exponentiate(tile);
            times_columns(tile, p_.v_width, scores_, values_, out_, j > 0);
        }
        float* log_sums = result_.log_sums + (task.first_token + i) * p_.heads + task.first_head + h;
        for (int64_t r = 0; r < rows; r++) {
            const float inverse = 1.0f / sums_[r];
            for (int64_t c = 0; c < v_; c += LANES) store(out_ + r * v_ + c, load(out_ + r * v_ + c) * inverse);
            log_sums[r * p_.heads] = largest_[r] + std::log(sums_[r]);
        }
        unpack_head(out_, 1, {result_.out, result_.out_row, result_.out_head, p_.v_width}, task, h, i, rows);
    }

    // Rows behind the last one of a tile are worked through in whole vectors; what comes out of them is not read.
    void raise_largest(const Tile& tile) {
        for (int64_t r = 0; r < tile.rows; r++) store(partial_ + r * LANES, largest_of(scores_ + r * TILE, tile.limit(r)));
        for (int64_t r = tile.rows; r < padded(tile.rows); r++) store(partial_ + r * LANES, Vector{});
        for (int64_t r = 0; r < tile.rows; r += LANES) {
            const Vector before = load(largest_ + r);
            const Vector largest = maximum(before, reduce_rows(partial_ + r * LANES, maximum));
            store(largest_ + r, largest);
            store(factors_ + r, exponential(before - largest));
        }
    }

    void scale_down(int64_t rows) {
        for (int64_t r = 0; r < rows; r++) {
            if (factors_[r] == 1.0f) continue;
            for (int64_t c = 0; c < v_; c += LANES) store(out_ + r * v_ + c, load(out_ + r * v_ + c) * factors_[r]);
        }
    }

    // Scores to exp(score - largest), zero above the diagonal; adds them to the rows' sums.
    void exponentiate(const Tile& tile) {
        for (int64_t r = 0; r < tile.rows; r++) {
            const int64_t limit = tile.limit(r);
            float* row = scores_ + r * TILE;
            const Vector largest = broadcast(largest_[r]);
            Vector total{};
            int64_t j = 0;
            for (; j + LANES <= limit; j += LANES) {
                const Vector x = exponential(load(row + j) - largest);
                total += x;
                store(row + j, x);
            }
            if (j < limit) {
                // What lies above the diagonal was never written: it is not fit for exp.
                const Vector x = first_lanes(exponential(first_lanes(load(row + j) - largest, limit - j)), limit - j);
                total += x;
                store(row + j, x);
                j += LANES;
            }
            for (; j < padded(tile.columns); j += LANES) store(row + j, Vector{});
            store(partial_ + r * LANES, total);
        }
        const auto add = [](Vector a, Vector b) { return a + b; };
        for (int64_t r = 0; r < tile.rows; r += LANES)
            store(sums_ + r, load(sums_ + r) * load(factors_ + r) + reduce_rows(partial_ + r * LANES, add));
    }

    const Shared& shared_;
    const TurbogrSoftmax& p_;
    const TurbogrSoftmaxResult& result_;
    int64_t qk_, v_, used_;
    float *queries_, *keys_, *transposed_keys_, *values_, *out_, *scores_, *partial_, *largest_, *factors_, *sums_;
};

class Backward {
  public:
    Backward(const Shared& shared, const TurbogrSoftmaxGradients& g, Arena arena)
        : shared_(shared), p_(shared.p), g_(g), qk_(padded(p_.qk_width)), v_(padded(p_.v_width)) {
        const int64_t longest = round_up(shared.queue.longest, TILE);
        packed_values_ = arena.take<float>(longest * v_);
        queries_ = arena.take<float>(longest * qk_);
        keys_ = arena.take<float>(longest * qk_);
        transposed_keys_ = arena.take<float>(longest * qk_);
        transposed_values_ = arena.take<float>(longest * v_);
        incoming_ = arena.take<float>(longest * v_);
        grad_queries_ = arena.take<float>(longest * qk_);
        log_sums_ = arena.take<float>(longest);
        means_ = arena.take<float>(longest);
        grad_keys_ = arena.take<float>(TILE * qk_);
        grad_values_ = arena.take<float>(TILE * v_);
        weights_ = arena.take<float>(TILE * TILE);
        grad_scores_ = arena.take<float>(TILE * TILE);
        used_ = arena.used();
    }

    int64_t used() const { return used_; }

    void run(const Task& task) {
        for (int64_t h = 0; h < task.heads; h++) {
            load_head(task, h);
            for (int64_t j = 0; j < task.length; j += TILE) {
                const int64_t columns = std::min<int64_t>(TILE, task.length - j);
                for (int64_t i = j; i < task.length; i += TILE)
                    add_tile({i, std::min<int64_t>(TILE, task.length - i), j, columns});
                unpack_head(grad_keys_, 1, {g_.k, g_.k_row, g_.k_head, p_.qk_width}, task, h, j, columns);
                unpack_head(grad_values_, 1, {g_.v, g_.v_row, g_.v_head, p_.v_width}, task, h, j, columns);
            }
            unpack_head(grad_queries_, p_.scale, {g_.q, g_.q_row, g_.q_head, p_.qk_width}, task, h, 0, task.length);
        }
    }

  private:
    // The scale goes into the queries: the gradient of the keys then needs none.
    void load_head(const Task& task, int64_t h) {
        pack_head(shared_.q(), task, h, p_.scale, queries_, task.length);
        pack_head(shared_.k(), task, h, 1, keys_, padded(task.length));
        pack_transposed(keys_, task.length, p_.qk_width, transposed_keys_);
        pack_head(shared_.v(), task, h, 1, packed_values_, padded(task.length));
        pack_transposed(packed_values_, task.length, p_.v_width, transposed_values_);
        pack_head({g_.incoming, g_.incoming_row, g_.incoming_head, p_.v_width}, task, h, 1, incoming_, task.length);
        const Heads<const float> out{g_.out, g_.out_row, g_.out_head, p_.v_width};
        for (int64_t i = 0; i < task.length; i++) {
            log_sums_[i] = g_.log_sums[(task.first_token + i) * p_.heads + task.first_head + h];
            means_[i] = dot(out.at(task.first_token + i, task.first_head + h), incoming_ + i * v_);
        }
    }

    // sum of weight times its gradient over a row, which is the output times the output's gradient.
    float dot(const float* out, const float* incoming) const {
        Vector total{};
        int64_t c = 0;
        for (; c + LANES <= p_.v_width; c += LANES) total += load(out + c) * load(incoming + c);
        float rest = 0;
        for (; c < p_.v_width; c++) rest += out[c] * incoming[c];
        return sum(total) + rest;
    }

    void add_tile(const Tile& tile) {
        const bool add = !tile.diagonal();  // a column of tiles begins on the diagonal
        scores(tile, p_.qk_width, queries_, transposed_keys_, weights_);
        scores(tile, p_.v_width, incoming_, transposed_values_, grad_scores_);
        differentiate(tile);
        times_rows(tile, p_.v_width, weights_, incoming_, grad_values_, add);
        times_rows(tile, p_.qk_width, grad_scores_, queries_, grad_keys_, add);
        times_columns(tile, p_.qk_width, grad_scores_, keys_, grad_queries_ + tile.first_row * qk_, tile.first_column > 0);
    }

    // Scores to weights, gradients of the weights to those of the scores; zero above the diagonal.
    void differentiate(const Tile& tile) {
        for (int64_t r = 0; r < tile.rows; r++) {
            const int64_t limit = tile.limit(r);
            float *weights = weights_ + r * TILE, *grad = grad_scores_ + r * TILE;
            const Vector log_sum = broadcast(log_sums_[tile.first_row + r]), mean = broadcast(means_[tile.first_row + r]);
            int64_t j = 0;
            for (; j + LANES <= limit; j += LANES) {
                const Vector weight = exponential(load(weights + j) - log_sum);
                store(weights + j, weight);
                store(grad + j, weight * (load(grad + j) - mean));
            }
            if (j < limit) {
                const Vector score = first_lanes(load(weights + j) - log_sum, limit - j);
                const Vector weight = first_lanes(exponential(score), limit - j);
                store(weights + j, weight);
                store(grad + j, weight * first_lanes(load(grad + j) - mean, limit - j));
                j += LANES;
            }
            for (; j < padded(tile.columns); j += LANES) {
                store(weights + j, Vector{});
                store(grad + j, Vector{});
            }
        }
    }

    const Shared& shared_;
    const TurbogrSoftmax& p_;
    const TurbogrSoftmaxGradients& g_;
    int64_t qk_, v_, used_;
    float *packed_values_, *queries_, *keys_, *transposed_keys_, *transposed_values_, *incoming_;
    float *grad_queries_, *log_sums_, *means_, *grad_keys_, *grad_values_, *weights_, *grad_scores_;
};

}  // namespace
}  // namespace turbogr

using namespace turbogr;

int turbogr_softmax_forward(const TurbogrSoftmax* problem, const TurbogrSoftmaxResult* result) {
    Shared shared(*problem);
    if (!shared.build()) return 1;
    const auto make = [&](Arena arena) { return Forward(shared, *result, arena); };
    const auto run = [&](Forward& worker, int64_t t) { worker.run(shared.queue.tasks[t]); };
    return work(shared.queue, problem->threads, make, run) ? 0 : 1;
}

int turbogr_softmax_backward(const TurbogrSoftmax* problem, const TurbogrSoftmaxGradients* gradients) {
    Shared shared(*problem);
    if (!shared.build()) return 1;
    const auto make = [&](Arena arena) { return Backward(shared, *gradients, arena); };
    const auto run = [&](Backward& worker, int64_t t) { worker.run(shared.queue.tasks[t]); };
    return work(shared.queue, problem->threads, make, run) ? 0 : 1;
}
