// HSTU's causal SiLU attention with relative position and time bias on jagged tensors, forward and backward, on a CPU: float32 or
// bfloat16 tensors, float32 inside, but for the factors of the matrix products if bfloat16 is asked for there: `Element` is what
// they consist of, a float or a pair of bfloat16.
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

constexpr int64_t BLOCK = 256;  // most columns of a block
constexpr int64_t BLOCK_FLOATS = 1 << 17;  // what the keys and values of a block and their gradients may take of the second cache

// What all tasks share.
struct Shared {
    const TurbogrHstu& p;
    Queue queue;
    BiasTables tables;

    explicit Shared(const TurbogrHstu& problem) : p(problem), tables(problem.bias) {}
    bool build() { return queue.build(p.offsets, p.sequences, p.heads) && tables.build(queue.longest); }
};

// What a thread needs to load and store heads.
template <typename Element>
class Worker {
  protected:
    static constexpr bool FLOATS = std::is_same_v<Element, float>;

    Worker(const Shared& shared, Arena& arena)
        : p_(shared.p), longest_(round_up(shared.queue.longest, TILE)), tokens_(shared.queue.most_tokens()) {
        const int64_t width = std::max(padded(p_.qk_width), padded(p_.v_width));
        floats_ = arena.take<float>(longest_ * width);
        along_ = arena.take<Element>(FLOATS ? 0 : longest_ * std::max(along(p_.qk_width), along(p_.v_width)));
    }

    // Elements of a row of a left or transposed factor.
    static int64_t along(int64_t width) { return row_elements<Element>(width); }

    // The rows of a head times a factor, with zeros up to whole vectors of rows; in `place` if they can be used as they are.
    const float* load_rows(const Heads<const void>& x, const Task& task, int64_t h, float factor, Element* place) {
        float* to = floats_;
        if constexpr (FLOATS) to = place == nullptr ? floats_ : place;
        if (p_.bfloat16) pack_head(x.of<const BFloat16>(), task, h, factor, to, padded(task.length));
        else pack_head(x.of<const float>(), task, h, factor, to, padded(task.length));
        return to;
    }

    // From those: rows of the left factor of scores(), the right factor of scores(), and that of times_columns and times_rows.
    void make_left(const float* rows, int64_t length, int64_t width, Element* to) {
        if constexpr (!FLOATS) pair_along(rows, padded(width), length, padded(width), to, along(width));
    }
    void make_transposed(const float* rows, int64_t length, int64_t width, Element* to) {
        if constexpr (FLOATS) {
            pack_transposed(rows, length, width, to);
        } else {
            pair_along(rows, padded(width), padded(length), padded(width), along_, along(width));
            pack_transposed(along_, length, width, to);
        }
    }
    void make_right(const float* rows, int64_t length, int64_t width, Element* to) {
        if constexpr (!FLOATS) pair_across(rows, padded(width), length, padded(width), to, padded(width));
    }

    void store_head(
        const float* from, float factor, const Heads<void>& x, const Task& task, int64_t h, int64_t first, int64_t rows
    ) const {
        if (p_.bfloat16) unpack_head(from, factor, x.of<BFloat16>(), task, h, first, rows);
        else unpack_head(from, factor, x.of<float>(), task, h, first, rows);
    }

    const TurbogrHstu& p_;
    const int64_t longest_, tokens_;
    float* floats_;
    Element* along_;
};

template <typename Element>
class Forward : Worker<Element> {
    using Base = Worker<Element>;
    using Base::p_;

  public:
    Forward(const Shared& shared, Heads<void> out, Arena arena)
        : Base(shared, arena), to_(out), bias_(shared.tables, arena), qk_(Base::along(p_.qk_width)), v_(padded(p_.v_width)) {
        const int64_t tokens = Base::tokens_;
        queries_ = arena.take<Element>(tokens * qk_);
        keys_ = arena.take<Element>(tokens * qk_);
        values_ = arena.take<Element>(tokens / EACH * v_);
        out_ = arena.take<float>(TILE * v_ * p_.heads);
        scores_ = arena.take<float>(TILE * TILE);
        factors_ = EACH == 1 ? nullptr : arena.take<Element>(TILE * TILE / EACH);
        used_ = arena.used();
    }

    int64_t used() const { return used_; }

    void run(const Task& task) {
        const int64_t stride = round_up(task.length, TILE);
        bias_.sequence(task);
        for (int64_t h = 0; h < task.heads; h++) load_head(task, h, stride);
        for (int64_t i = 0; i < task.length; i += TILE) {
            const int64_t rows = std::min<int64_t>(TILE, task.length - i);
            for (int64_t j = 0; j <= i; j += TILE) {
                const Tile tile{i, rows, j, std::min<int64_t>(TILE, task.length - j)};
                bias_.prepare(tile);
                for (int64_t h = 0; h < task.heads; h++) {
                    const Element* weights = weights_of(tile, queries_ + h * stride * qk_, keys_ + h * stride * qk_);
                    times_columns(tile, p_.v_width, weights, values_ + h * stride / EACH * v_, out_ + h * TILE * v_, j > 0);
                }
            }
            for (int64_t h = 0; h < task.heads; h++) Base::store_head(out_ + h * TILE * v_, p_.scale, to_, task, h, i, rows);
        }
    }

  private:
    static constexpr int64_t EACH = FACTORS<Element>;

    void load_head(const Task& task, int64_t h, int64_t stride) {
        Element *queries = queries_ + h * stride * qk_, *values = values_ + h * stride / EACH * v_;
        const float* rows = Base::load_rows({p_.q, p_.q_row, p_.q_head, p_.qk_width}, task, h, p_.alpha, queries);
        Base::make_left(rows, task.length, p_.qk_width, queries);
        rows = Base::load_rows({p_.k, p_.k_row, p_.k_head, p_.qk_width}, task, h, 1, nullptr);
        Base::make_transposed(rows, task.length, p_.qk_width, keys_ + h * stride * qk_);
        rows = Base::load_rows({p_.v, p_.v_row, p_.v_head, p_.v_width}, task, h, 1, values);
        Base::make_right(rows, task.length, p_.v_width, values);
    }

    // SiLU of the scores, as left factor of times_columns.
    const Element* weights_of(const Tile& tile, const Element* queries, const Element* keys) {
        scores(tile, p_.qk_width, queries, keys, scores_);
        activate(tile);
        if constexpr (EACH > 1) {
            pair_along(scores_, TILE, tile.rows, padded(tile.columns), factors_, TILE / EACH);
            return factors_;
        } else {
            return scores_;
        }
    }

    void activate(const Tile& tile) {
        for (int64_t i = 0; i < tile.rows; i++) {
            const int64_t limit = tile.limit(i);
            float* row = scores_ + i * TILE;
            const BiasRow bias = bias_.sum(i);
            int64_t j = 0;
            for (; j < limit; j += LANES) {
                const Vector x = load(row + j) + (load(bias.values + j) + bias.constant);
                store(row + j, x * sigmoid(x));
            }
            if (j > limit) store(row + j - LANES, first_lanes(load(row + j - LANES), limit - (j - LANES)));
            for (; j < padded(tile.columns); j += LANES) store(row + j, Vector{});
        }
    }

    Heads<void> to_;
    TileBias bias_;
    int64_t qk_, v_, used_;
    Element *queries_, *keys_, *values_, *factors_;
    float *out_, *scores_;
};

template <typename Element>
class Backward : Worker<Element> {
    using Base = Worker<Element>;
    using Base::p_;

  public:
    Backward(const Shared& shared, const TurbogrHstuGradients& g, Arena arena)
        : Base(shared, arena),
          g_(g),
          tables_(shared.tables),
          bias_(tables_, arena),
          bias_gradients_(tables_, bias_, arena),
          qk_(padded(p_.qk_width)),
          v_(padded(p_.v_width)),
          qk_along_(Base::along(p_.qk_width)),
          v_along_(Base::along(p_.v_width)) {
        const int64_t tokens = Base::tokens_;
        queries_ = arena.take<Element>(tokens * qk_along_);
        incoming_ = arena.take<Element>(tokens * v_along_);
        transposed_keys_ = arena.take<Element>(tokens * qk_along_);
        transposed_values_ = arena.take<Element>(tokens * v_along_);
        right_keys_ = arena.take<Element>(tokens / EACH * qk_);
        right_queries_ = EACH == 1 ? queries_ : arena.take<Element>(tokens / EACH * qk_);
        right_incoming_ = EACH == 1 ? incoming_ : arena.take<Element>(tokens / EACH * v_);
        grad_queries_ = arena.take<float>(tokens * qk_);
        // A block of columns goes down the rows together, so that these come from the outer caches once a block.
        block_ = std::clamp<int64_t>(BLOCK_FLOATS / (p_.heads * (3 * qk_ + 2 * v_)) / TILE * TILE, TILE, BLOCK);
        grad_keys_ = arena.take<float>(block_ * qk_ * p_.heads);
        grad_values_ = arena.take<float>(block_ * v_ * p_.heads);
        weights_ = arena.take<float>(TILE * TILE);
        grad_scores_ = arena.take<float>(TILE * TILE);
        grad_bias_ = arena.take<float>(TILE * TILE);
        for (Element*& factors : factors_) factors = EACH == 1 ? nullptr : arena.take<Element>(TILE * TILE / EACH);
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
                Base::store_head(grad_keys_ + h * block_ * qk_, 1, k, task, h, begin, end - begin);
                Base::store_head(grad_values_ + h * block_ * v_, 1, v, task, h, begin, end - begin);
            }
        }
        const Heads<void> q{g_.q, g_.q_row, g_.q_head, p_.qk_width};
        for (int64_t h = 0; h < task.heads; h++)
            Base::store_head(grad_queries_ + h * stride * qk_, p_.alpha, q, task, h, 0, task.length);
    }

  private:
    static constexpr int64_t EACH = FACTORS<Element>;

    // alpha goes into the queries, scale into the incoming gradient: no product has to be scaled afterwards but that of dq.
    void load_head(const Task& task, int64_t h, int64_t stride) {
        const int64_t n = task.length, qk = p_.qk_width, v = p_.v_width;
        Element *queries = queries_ + h * stride * qk_along_, *incoming = incoming_ + h * stride * v_along_;
        Element* keys = right_keys_ + h * stride / EACH * qk_;
        const float* rows = Base::load_rows({p_.q, p_.q_row, p_.q_head, qk}, task, h, p_.alpha, queries);
        Base::make_left(rows, n, qk, queries);
        Base::make_right(rows, n, qk, right_queries_ + h * stride / EACH * qk_);
        rows = Base::load_rows({p_.k, p_.k_row, p_.k_head, qk}, task, h, 1, keys);
        Base::make_transposed(rows, n, qk, transposed_keys_ + h * stride * qk_along_);
        Base::make_right(rows, n, qk, keys);
        rows = Base::load_rows({p_.v, p_.v_row, p_.v_head, v}, task, h, 1, nullptr);
        Base::make_transposed(rows, n, v, transposed_values_ + h * stride * v_along_);
        rows = Base::load_rows({g_.out, g_.out_row, g_.out_head, v}, task, h, p_.scale, incoming);
        Base::make_left(rows, n, v, incoming);
        Base::make_right(rows, n, v, right_incoming_ + h * stride / EACH * v_);
    }

    // `row` is where the gradients of the tile's keys and values begin.
    void tile_of_head(const Tile& tile, int64_t h, int64_t stride, int64_t row) {
        const int64_t right = h * stride / EACH;
        const bool add = !tile.diagonal();  // a column of tiles begins on the diagonal
        scores(tile, p_.qk_width, queries_ + h * stride * qk_along_, transposed_keys_ + h * stride * qk_along_, weights_);
        scores(tile, p_.v_width, incoming_ + h * stride * v_along_, transposed_values_ + h * stride * v_along_, grad_scores_);
        activate(tile, h > 0);
        if constexpr (EACH > 1) {
            const int64_t columns = padded(tile.columns);
            pair_across(weights_, TILE, tile.rows, columns, factors_[0], TILE);
            pair_across(grad_scores_, TILE, tile.rows, columns, factors_[1], TILE);
            pair_along(grad_scores_, TILE, tile.rows, columns, factors_[2], TILE / EACH);
        }
        float* grad_queries = grad_queries_ + (h * stride + tile.first_row) * qk_;
        const auto factors = [&](int which, const float* floats) -> const Element* {
            if constexpr (EACH > 1) return factors_[which];
            else return floats;
        };
        times_rows(tile, p_.v_width, factors(0, weights_), right_incoming_ + right * v_, grad_values_ + row * v_, add);
        times_rows(tile, p_.qk_width, factors(1, grad_scores_), right_queries_ + right * qk_, grad_keys_ + row * qk_, add);
        times_columns(tile, p_.qk_width, factors(2, grad_scores_), right_keys_ + right * qk_, grad_queries, tile.first_column > 0);
    }

    // Scores to SiLU of scores, gradients of the SiLU's output to those of its input; the latter summed over heads besides.
    void activate(const Tile& tile, bool add) {
        for (int64_t i = 0; i < tile.rows; i++) {
            const int64_t limit = tile.limit(i);
            float *weights = weights_ + i * TILE, *grad = grad_scores_ + i * TILE, *total = grad_bias_ + i * TILE;
            const BiasRow bias = bias_.sum(i);
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
            for (; j < padded(tile.columns); j += LANES) {
                store(weights + j, Vector{});
                store(grad + j, Vector{});
            }
        }
    }

    const TurbogrHstuGradients& g_;
    const BiasTables& tables_;
    TileBias bias_;
    TaskBiasGradients bias_gradients_;
    int64_t qk_, v_, qk_along_, v_along_, block_, used_;
    bool several_heads_ = false;
    Element *queries_, *incoming_, *transposed_keys_, *transposed_values_, *right_keys_, *right_queries_, *right_incoming_;
    Element* factors_[3];  // pairs of weights_ and grad_scores_
    float *grad_queries_, *grad_keys_, *grad_values_, *weights_, *grad_scores_, *grad_bias_;
};

template <typename Element>
bool forward(const Shared& shared, const Heads<void>& out) {
    const auto make = [&](Arena arena) { return Forward<Element>(shared, out, arena); };
    const auto run = [&](Forward<Element>& worker, int64_t t) { worker.run(shared.queue.tasks[t]); };
    return work(shared.queue, shared.p.threads, make, run);
}

template <typename Element>
bool backward(const Shared& shared, const TurbogrHstuGradients& gradients, const BiasGradients& bias) {
    const auto make = [&](Arena arena) { return Backward<Element>(shared, gradients, arena); };
    const auto run = [&](Backward<Element>& worker, int64_t t) { worker.run(shared.queue.tasks[t], bias, t); };
    return work(shared.queue, shared.p.threads, make, run);
}

}  // namespace
}  // namespace turbogr

using namespace turbogr;

int turbogr_hstu_forward(const TurbogrHstu* problem, void* out, int64_t out_row, int64_t out_head) {
    Shared shared(*problem);
    if (!shared.build()) return 1;
    const Heads<void> to{out, out_row, out_head, problem->v_width};
    return (problem->bfloat16_products ? forward<int32_t>(shared, to) : forward<float>(shared, to)) ? 0 : 1;
}

int turbogr_hstu_backward(const TurbogrHstu* problem, const TurbogrHstuGradients* gradients) {
    Shared shared(*problem);
    if (!shared.build()) return 1;
    BiasGradients bias(shared.tables, shared.queue);
    if (!bias.build()) return 1;
    const auto run = problem->bfloat16_products ? backward<int32_t> : backward<float>;
    if (!run(shared, *gradients, bias)) return 1;
    return bias.finish(gradients->position_bias, gradients->position_count, gradients->time_bias) ? 0 : 1;
}
