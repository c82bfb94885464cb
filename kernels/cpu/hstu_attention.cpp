// HSTU's causal SiLU attention with relative position and time bias on jagged tensors, forward and backward, on a CPU: float32 or
// bfloat16 tensors, float32 inside.
// The formula stands in turbogr/ops/hstu_attention.py.
//
// A task is one sequence and some of its heads. Tasks are taken from a queue, the longest first. Inside, 64 x 64 tiles of
// scores: tiles above the diagonal are skipped, those on it are computed up to the diagonal only, the bias of a tile is worked
// out once for all heads of the task, and backward computes the scores again. The gradients of the bias tables are summed per
// task, then over tasks in their order in the batch: the result does not depend on the number of threads.

#include "hstu_attention.h"

#include <algorithm>

#include "bfloat16.h"
#include "bias.h"
#include "tasks.h"
#include "tiles.h"
#include "vectors.h"

namespace turbogr {
namespace {

constexpr int64_t STRIP = 12;  // so many rows of a tile go through the elementwise part together, while they lie in the first cache

constexpr int64_t BLOCK = 256;  // most columns of a block
constexpr int64_t BLOCK_FLOATS = 1 << 17;  // what the keys and values of a block and their gradients may take of the second cache

// What all tasks share.
struct Shared {
    const TurbogrHstu& p;
    Queue queue;
    BiasTables tables;

    explicit Shared(const TurbogrHstu& problem) : p(problem), tables(problem.bias) {}
    bool build() { return queue.build(p.offsets, p.sequences, p.heads) && tables.build(queue.longest); }

    // pack_head and unpack_head for tensors of the problem's element type.
    void load_head(
        const Heads<const void>& x, const Task& task, int64_t h, float factor, float* to, int64_t rows
    ) const {
        if (p.bfloat16) pack_head(x.of<const BFloat16>(), task, h, factor, to, rows);
        else pack_head(x.of<const float>(), task, h, factor, to, rows);
    }
    void store_head(
        const float* from, float factor, const Heads<void>& x, const Task& task, int64_t h, int64_t first, int64_t rows
    ) const {
        if (p.bfloat16) unpack_head(from, factor, x.of<BFloat16>(), task, h, first, rows);
        else unpack_head(from, factor, x.of<float>(), task, h, first, rows);
    }
};

class Forward {
  public:
    Forward(const Shared& shared, Heads<void> out, Arena arena)
        : shared_(shared), p_(shared.p), to_(out), bias_(shared.tables, arena), qk_(padded(p_.qk_width)), v_(padded(p_.v_width)) {
        const int64_t longest = shared.queue.longest, tokens = shared.queue.most_tokens();
        packed_keys_ = arena.take<float>(round_up(longest, TILE) * qk_);
        queries_ = arena.take<float>(tokens * qk_);
        keys_ = arena.take<float>(tokens * qk_);
        values_ = arena.take<float>(tokens * v_);
        out_ = arena.take<float>(TILE * v_ * shared.p.heads);
        scores_ = arena.take<float>(TILE * TILE);
        used_ = arena.used();
    }

    int64_t used() const { return used_; }

    void run(const Task& task) {
        const int64_t stride = round_up(task.length, TILE);
        bias_.sequence(task);
        for (int64_t h = 0; h < task.heads; h++) {
            shared_.load_head({p_.q, p_.q_row, p_.q_head, p_.qk_width}, task, h, p_.alpha, queries_ + h * stride * qk_, task.length);
            shared_.load_head({p_.k, p_.k_row, p_.k_head, p_.qk_width}, task, h, 1, packed_keys_, padded(task.length));
            pack_transposed(packed_keys_, task.length, p_.qk_width, keys_ + h * stride * qk_);
            shared_.load_head({p_.v, p_.v_row, p_.v_head, p_.v_width}, task, h, 1, values_ + h * stride * v_, task.length);
        }
        for (int64_t i = 0; i < task.length; i += TILE) {
            const int64_t rows = std::min<int64_t>(TILE, task.length - i);
            for (int64_t j = 0; j <= i; j += TILE) {
                const Tile tile{i, rows, j, std::min<int64_t>(TILE, task.length - j)};
                bias_.prepare(tile);
                for (int64_t h = 0; h < task.heads; h++) {
                    for (int64_t m = 0; m < rows; m += STRIP) {
                        const Tile strip = tile.strip(m, std::min(STRIP, rows - m));
                        float* to = scores_ + m * TILE;
                        scores(strip, p_.qk_width, queries_ + h * stride * qk_, keys_ + h * stride * qk_, to);
                        activate(strip, m, to);
                    }
                    times_columns(tile, p_.v_width, scores_, values_ + h * stride * v_, out_ + h * TILE * v_, j > 0);
                }
            }
            for (int64_t h = 0; h < task.heads; h++) shared_.store_head(out_ + h * TILE * v_, p_.scale, to_, task, h, i, rows);
        }
    }

  private:
    // `first` is the strip's first row in its tile.
    void activate(const Tile& strip, int64_t first, float* row) {
        for (int64_t i = 0; i < strip.rows; i++, row += TILE) {
            const int64_t limit = strip.limit(i);
            const BiasRow bias = bias_.sum(first + i);
            int64_t j = 0;
            for (; j < limit; j += LANES) {
                const Vector x = load(row + j) + (load(bias.values + j) + bias.constant);
                store(row + j, x * sigmoid(x));
            }
            if (j > limit) store(row + j - LANES, first_lanes(load(row + j - LANES), limit - (j - LANES)));
            for (; j < padded(strip.columns); j += LANES) store(row + j, Vector{});
        }
    }

    const Shared& shared_;
    const TurbogrHstu& p_;
    Heads<void> to_;
    TileBias bias_;
    int64_t qk_, v_, used_;
    float *packed_keys_, *queries_, *keys_, *values_, *out_, *scores_;
};

class Backward {
  public:
    Backward(const Shared& shared, const TurbogrHstuGradients& g, Arena arena)
        : shared_(shared),
          p_(shared.p),
          g_(g),
          tables_(shared.tables),
          bias_(tables_, arena),
          bias_gradients_(tables_, bias_, arena),
          qk_(padded(p_.qk_width)),
          v_(padded(p_.v_width)) {
        const int64_t longest = shared.queue.longest, tokens = shared.queue.most_tokens();
        packed_values_ = arena.take<float>(round_up(longest, TILE) * v_);
        queries_ = arena.take<float>(tokens * qk_);
        keys_ = arena.take<float>(tokens * qk_);
        transposed_keys_ = arena.take<float>(tokens * qk_);
        transposed_values_ = arena.take<float>(tokens * v_);
        incoming_ = arena.take<float>(tokens * v_);
        grad_queries_ = arena.take<float>(tokens * qk_);
        // A block of columns goes down the rows together, so that these come from the outer caches once a block.
        block_ = std::clamp<int64_t>(BLOCK_FLOATS / (p_.heads * (3 * qk_ + 2 * v_)) / TILE * TILE, TILE, BLOCK);
        grad_keys_ = arena.take<float>(block_ * qk_ * p_.heads);
        grad_values_ = arena.take<float>(block_ * v_ * p_.heads);
        weights_ = arena.take<float>(TILE * TILE);
        grad_scores_ = arena.take<float>(TILE * TILE);
        grad_bias_ = arena.take<float>(TILE * TILE);
        used_ = arena.used();
    }

    int64_t used() const { return used_; }

    // `index` is the task's place in the batch.
    void run(const Task& task, const BiasGradients& gradients, int64_t index) {
        const int64_t stride = round_up(task.length, TILE);
        bias_.sequence(task);
        for (int64_t h = 0; h < task.heads; h++) load_head(task, h, stride);
        several_heads_ = task.heads > 1;
        const float* grad_bias = several_heads_ ? grad_bias_ : grad_scores_;
        bias_gradients_.begin(task, gradients, index);
        for (int64_t begin = 0; begin < task.length; begin += block_) {
            const int64_t end = std::min(begin + block_, task.length);
            for (int64_t i = begin; i < task.length; i += TILE)
                for (int64_t j = begin; j < std::min(end, i + TILE); j += TILE) {
                    const Tile tile{i, std::min<int64_t>(TILE, task.length - i), j, std::min<int64_t>(TILE, task.length - j)};
                    bias_.prepare(tile);
                    for (int64_t h = 0; h < task.heads; h++) tile_of_head(tile, h, stride, h * block_ + j - begin);
                    if (tables_.position()) bias_gradients_.add_positions(tile, grad_bias);
                    if (tables_.time()) bias_gradients_.add_buckets(tile, grad_bias);
                }
            bias_gradients_.flush();
            for (int64_t h = 0; h < task.heads; h++) {
                const Heads<void> k{g_.k, g_.k_row, g_.k_head, p_.qk_width}, v{g_.v, g_.v_row, g_.v_head, p_.v_width};
                shared_.store_head(grad_keys_ + h * block_ * qk_, 1, k, task, h, begin, end - begin);
                shared_.store_head(grad_values_ + h * block_ * v_, 1, v, task, h, begin, end - begin);
            }
        }
        const Heads<void> q{g_.q, g_.q_row, g_.q_head, p_.qk_width};
        for (int64_t h = 0; h < task.heads; h++)
            shared_.store_head(grad_queries_ + h * stride * qk_, p_.alpha, q, task, h, 0, task.length);
    }

  private:
    // alpha goes into the queries, scale into the incoming gradient: no product has to be scaled afterwards but that of dq.
    void load_head(const Task& task, int64_t h, int64_t stride) {
        float* keys = keys_ + h * stride * qk_;
        shared_.load_head({p_.q, p_.q_row, p_.q_head, p_.qk_width}, task, h, p_.alpha, queries_ + h * stride * qk_, task.length);
        shared_.load_head({p_.k, p_.k_row, p_.k_head, p_.qk_width}, task, h, 1, keys, padded(task.length));
        pack_transposed(keys, task.length, p_.qk_width, transposed_keys_ + h * stride * qk_);
        shared_.load_head({p_.v, p_.v_row, p_.v_head, p_.v_width}, task, h, 1, packed_values_, padded(task.length));
        pack_transposed(packed_values_, task.length, p_.v_width, transposed_values_ + h * stride * v_);
        shared_.load_head({g_.out, g_.out_row, g_.out_head, p_.v_width}, task, h, p_.scale, incoming_ + h * stride * v_, task.length);
    }

    // `row` is where the gradients of the tile's keys and values begin.
    void tile_of_head(const Tile& tile, int64_t h, int64_t stride, int64_t row) {
        const float* queries = queries_ + h * stride * qk_;
        const float* incoming = incoming_ + h * stride * v_;
        float* grad_queries = grad_queries_ + (h * stride + tile.first_row) * qk_;
        const bool add = !tile.diagonal();  // a column of tiles begins on the diagonal
        for (int64_t m = 0; m < tile.rows; m += STRIP) {
            const Tile strip = tile.strip(m, std::min(STRIP, tile.rows - m));
            scores(strip, p_.qk_width, queries, transposed_keys_ + h * stride * qk_, weights_ + m * TILE);
            scores(strip, p_.v_width, incoming, transposed_values_ + h * stride * v_, grad_scores_ + m * TILE);
            activate(strip, m, h > 0);
        }
        times_rows(tile, p_.v_width, weights_, incoming, grad_values_ + row * v_, add);
        times_rows(tile, p_.qk_width, grad_scores_, queries, grad_keys_ + row * qk_, add);
        times_columns(tile, p_.qk_width, grad_scores_, keys_ + h * stride * qk_, grad_queries, tile.first_column > 0);
    }

    // Scores to SiLU of scores, gradients of the SiLU's output to those of its input; the latter summed over heads besides.
    // `first` is the strip's first row in its tile.
    void activate(const Tile& strip, int64_t first, bool add) {
        for (int64_t i = 0; i < strip.rows; i++) {
            const int64_t limit = strip.limit(i), begin = (first + i) * TILE;
            float *weights = weights_ + begin, *grad = grad_scores_ + begin, *total = grad_bias_ + begin;
            const BiasRow bias = bias_.sum(first + i);
            int64_t j = 0;
            for (; j < limit; j += LANES) {
                const Vector x = load(weights + j) + (load(bias.values + j) + bias.constant);
                const Vector gate = sigmoid(x), weight = x * gate;
                Vector slope = load(grad + j) * (gate + weight * (1.0f - gate));
                if (j + LANES > limit) {
                    slope = first_lanes(slope, limit - j);
                    store(weights + j, first_lanes(weight, limit - j));
                } else {
                    store(weights + j, weight);
                }
                store(grad + j, slope);
                if (several_heads_) store(total + j, add ? load(total + j) + slope : slope);
            }
            for (; j < padded(strip.columns); j += LANES) {
                store(weights + j, Vector{});
                store(grad + j, Vector{});
            }
        }
    }

    const Shared& shared_;
    const TurbogrHstu& p_;
    const TurbogrHstuGradients& g_;
    const BiasTables& tables_;
    TileBias bias_;
    TaskBiasGradients bias_gradients_;
    int64_t qk_, v_, block_, used_;
    bool several_heads_ = false;
    float *packed_values_, *queries_, *keys_, *transposed_keys_, *transposed_values_, *incoming_;
    float *grad_queries_, *grad_keys_, *grad_values_, *weights_, *grad_scores_, *grad_bias_;
};

}  // namespace
}  // namespace turbogr

using namespace turbogr;

int turbogr_hstu_forward(const TurbogrHstu* problem, void* out, int64_t out_row, int64_t out_head) {
    Shared shared(*problem);
    if (!shared.build()) return 1;
    const Heads<void> to{out, out_row, out_head, problem->v_width};
    const auto make = [&](Arena arena) { return Forward(shared, to, arena); };
    const auto run = [&](Forward& worker, int64_t t) { worker.run(shared.queue.tasks[t]); };
    return work(shared.queue, problem->threads, make, run) ? 0 : 1;
}

int turbogr_hstu_backward(const TurbogrHstu* problem, const TurbogrHstuGradients* gradients) {
    Shared shared(*problem);
    if (!shared.build()) return 1;
    BiasGradients bias(shared.tables, shared.queue);
    if (!bias.build()) return 1;
    const auto make = [&](Arena arena) { return Backward(shared, *gradients, arena); };
    const auto run = [&](Backward& worker, int64_t t) { worker.run(shared.queue.tasks[t], bias, t); };
    if (!work(shared.queue, problem->threads, make, run)) return 1;
    return bias.finish(gradients->position_bias, gradients->position_count, gradients->time_bias) ? 0 : 1;
}
