// FuXi's causal attention in three channels on jagged tensors, forward and backward, float32 on a CPU. The formula stands in
// turbogr/ops/fuxi_attention.py.
//
// Tasks, tiles and sums are those of hstu_attention.cpp. Position and time weights are the same for all heads: those of a tile
// are worked out once for all heads of a task, and their gradients are summed over these heads by the product that makes them.

#include "fuxi_attention.h"

#include <algorithm>

#include "bias.h"
#include "tasks.h"
#include "tiles.h"
#include "time_function.h"
#include "vectors.h"

namespace turbogr {
namespace {

// The channels in the order of the output.
enum Channel { POSITION, TIME, SEMANTIC, CHANNELS };

// What all tasks share.
struct Shared {
    const TurbogrFuxi& p;
    Queue queue;
    BiasTables tables;

    explicit Shared(const TurbogrFuxi& problem) : p(problem), tables(problem.bias) {}
    bool build() { return queue.build(p.offsets, p.sequences, p.heads) && tables.build(queue.longest); }

    bool function() const { return p.time_function != nullptr; }
    bool has(Channel channel) const {
        if (channel == POSITION) return tables.position();
        return channel == SEMANTIC || tables.time() || function();
    }
};

// Position and time weights of one tile after another, zero above the diagonal.
class SharedWeights {
    typedef double Doubles __attribute__((vector_size(8 * LANES)));

  public:
    SharedWeights(const Shared& shared, Arena& arena)
        : shared_(shared),
          bias_(shared.tables, arena, true),
          function_(shared.function() ? shared.p.time_function : NOTHING, shared.p.bias.time_unit) {
        position_ = arena.take<float>(TILE * TILE);
        time_ = arena.take<float>(TILE * TILE);
        if (shared.function()) times_memory_ = arena.take<char>(SequenceTimes::bytes(shared.queue.longest));
    }

    void sequence(const Task& task) {
        bias_.sequence(task);
        if (!shared_.function()) return;
        const TurbogrBias& inputs = shared_.p.bias;
        const int64_t token = task.first_token;
        times_.prepare(inputs.query_times + token, inputs.key_times + token, task.length, times_memory_);
    }

    // With `gradients`, those of the tile's time weights: adds to the sums of a time function's gradient.
    void prepare(const Tile& tile, const float* gradients = nullptr, TimeFunction::Sums* sums = nullptr) {
        bias_.prepare(tile);
        for (int64_t i = 0; i < tile.rows && shared_.has(POSITION); i++)
            copy_row(bias_.positions(i), tile.limit(i), position_ + i * TILE);
        for (int64_t i = 0; i < tile.rows && shared_.tables.time(); i++) copy_row(bias_.row(i), tile.limit(i), time_ + i * TILE);
        if (shared_.function()) evaluate(tile, gradients, sums);
    }

    const float* of(Channel channel) const { return channel == POSITION ? position_ : time_; }
    const TileBias& bias() const { return bias_; }

  private:
    static void copy_row(const float* from, int64_t limit, float* to) {
        int64_t j = 0;
        for (; j < limit; j += LANES) store(to + j, load(from + j));
        finish_row(limit, to);
    }

    // Zeros behind the limit.
    static void finish_row(int64_t limit, float* row) {
        const int64_t whole = limit / LANES * LANES;
        if (whole < limit) store(row + whole, first_lanes(load(row + whole), limit - whole));
        for (int64_t j = padded(limit); j < TILE; j += LANES) store(row + j, Vector{});
    }

    void evaluate(const Tile& tile, const float* gradients, TimeFunction::Sums* sums) {
        alignas(64) float gaps[TILE];
        Doubles plain{}, by_power{}, by_log{};
        for (int64_t i = 0; i < tile.rows; i++) {
            const int64_t limit = tile.limit(i);
            Vector row_plain{}, row_by_power{}, row_by_log{};
            gaps_of_row(times_, tile.first_row + i, tile.first_column, limit, gaps);
            for (int64_t j = 0; j < limit; j += LANES) {
                const TimeFunction::Parts parts = function_.parts(load(gaps + j));
                store(time_ + i * TILE + j, parts.decayed * function_.amplitude());
                if (gradients == nullptr) continue;
                const Vector x = load(gradients + i * TILE + j) * parts.decayed, y = x * parts.power;
                row_plain += x;
                row_by_power += y;
                row_by_log += y * parts.log;
            }
            finish_row(limit, time_ + i * TILE);
            // Terms of both signs, millions of them: beyond a row they are added up in float64.
            plain += __builtin_convertvector(row_plain, Doubles);
            by_power += __builtin_convertvector(row_by_power, Doubles);
            by_log += __builtin_convertvector(row_by_log, Doubles);
        }
        for (int lane = 0; lane < LANES && gradients != nullptr; lane++) {
            sums->plain += plain[lane];
            sums->by_power += by_power[lane];
            sums->by_log += by_log[lane];
        }
    }

    static constexpr double NOTHING[3] = {0, 1, 1};

    const Shared& shared_;
    TileBias bias_;
    TimeFunction function_;
    SequenceTimes times_{};
    void* times_memory_ = nullptr;
    float *position_, *time_;
};

class Forward {
  public:
    Forward(const Shared& shared, float* out, int64_t out_row, int64_t out_head, Arena arena)
        : shared_(shared), p_(shared.p), weights_(shared, arena), qk_(padded(p_.qk_width)), v_(padded(p_.v_width)) {
        const int64_t tokens = shared.queue.most_tokens();
        for (int64_t channel = 0; channel < CHANNELS; channel++) {
            to_[channel] = {out + channel * p_.v_width, out_row, out_head, p_.v_width};
            out_[channel] = arena.take<float>(TILE * v_ * p_.heads);
        }
        packed_keys_ = arena.take<float>(round_up(shared.queue.longest, TILE) * qk_);
        queries_ = arena.take<float>(tokens * qk_);
        keys_ = arena.take<float>(tokens * qk_);
        values_ = arena.take<float>(tokens * v_);
        scores_ = arena.take<float>(TILE * TILE);
        used_ = arena.used();
    }

    int64_t used() const { return used_; }

    void run(const Task& task) {
        const int64_t stride = round_up(task.length, TILE);
        weights_.sequence(task);
        for (int64_t h = 0; h < task.heads; h++) {
            pack_head({p_.q, p_.q_row, p_.q_head, p_.qk_width}, task, h, p_.alpha, queries_ + h * stride * qk_, task.length);
            pack_head({p_.k, p_.k_row, p_.k_head, p_.qk_width}, task, h, 1, packed_keys_, padded(task.length));
            pack_transposed(packed_keys_, task.length, p_.qk_width, keys_ + h * stride * qk_);
            pack_head({p_.v, p_.v_row, p_.v_head, p_.v_width}, task, h, 1, values_ + h * stride * v_, task.length);
        }
        for (const Channel channel : {POSITION, TIME})
            if (!shared_.has(channel)) std::fill_n(out_[channel], TILE * v_ * task.heads, 0.0f);
        for (int64_t i = 0; i < task.length; i += TILE) {
            const int64_t rows = std::min<int64_t>(TILE, task.length - i);
            for (int64_t j = 0; j <= i; j += TILE) {
                const Tile tile{i, rows, j, std::min<int64_t>(TILE, task.length - j)};
                weights_.prepare(tile);
                for (int64_t h = 0; h < task.heads; h++) {
                    const float* values = values_ + h * stride * v_;
                    for (const Channel channel : {POSITION, TIME})
                        if (shared_.has(channel))
                            times_columns(tile, p_.v_width, weights_.of(channel), values, out_[channel] + h * TILE * v_, j > 0);
                    scores(tile, p_.qk_width, queries_ + h * stride * qk_, keys_ + h * stride * qk_, scores_);
                    activate(tile);
                    times_columns(tile, p_.v_width, scores_, values, out_[SEMANTIC] + h * TILE * v_, j > 0);
                }
            }
            for (int64_t h = 0; h < task.heads; h++)
                for (int64_t channel = 0; channel < CHANNELS; channel++) {
                    const float factor = channel == SEMANTIC ? p_.scale : 1;
                    unpack_head(out_[channel] + h * TILE * v_, factor, to_[channel], task, h, i, rows);
                }
        }
    }

  private:
    void activate(const Tile& tile) {
        for (int64_t i = 0; i < tile.rows; i++) {
            const int64_t limit = tile.limit(i);
            float* row = scores_ + i * TILE;
            int64_t j = 0;
            for (; j < limit; j += LANES) {
                const Vector x = load(row + j);
                store(row + j, x * sigmoid(x));
            }
            if (j > limit) store(row + j - LANES, first_lanes(load(row + j - LANES), limit - (j - LANES)));
            for (; j < padded(tile.columns); j += LANES) store(row + j, Vector{});
        }
    }

    const Shared& shared_;
    const TurbogrFuxi& p_;
    SharedWeights weights_;
    int64_t qk_, v_, used_;
    Heads<float> to_[CHANNELS];
    float* out_[CHANNELS];
    float *packed_keys_, *queries_, *keys_, *values_, *scores_;
};

class Backward {
  public:
    Backward(const Shared& shared, const TurbogrFuxiGradients& g, Arena arena)
        : shared_(shared),
          p_(shared.p),
          g_(g),
          shared_weights_(shared, arena),
          table_gradients_(shared.tables, shared_weights_.bias(), arena),
          qk_(padded(p_.qk_width)),
          v_(padded(p_.v_width)) {
        const int64_t longest = shared.queue.longest, tokens = shared.queue.most_tokens();
        for (int64_t channel = 0; channel < CHANNELS; channel++) {
            incoming_[channel] = arena.take<float>(tokens * v_);
            gradients_[channel] = arena.take<float>(TILE * TILE);
        }
        packed_values_ = arena.take<float>(round_up(longest, TILE) * v_);
        queries_ = arena.take<float>(tokens * qk_);
        keys_ = arena.take<float>(tokens * qk_);
        transposed_keys_ = arena.take<float>(tokens * qk_);
        transposed_values_ = arena.take<float>(tokens * v_);
        grad_queries_ = arena.take<float>(tokens * qk_);
        grad_keys_ = arena.take<float>(TILE * qk_ * p_.heads);
        grad_values_ = arena.take<float>(TILE * v_ * p_.heads);
        weights_ = arena.take<float>(TILE * TILE);
        used_ = arena.used();
    }

    int64_t used() const { return used_; }

    // `index` is the task's place in the batch; `sums` are the task's own.
    void run(const Task& task, const BiasGradients& tables, int64_t index, TimeFunction::Sums* sums) {
        const int64_t stride = round_up(task.length, TILE);
        shared_weights_.sequence(task);
        for (int64_t h = 0; h < task.heads; h++) load_head(task, h, stride);
        table_gradients_.begin(task, tables, index);
        *sums = {};
        for (int64_t j = 0; j < task.length; j += TILE) {
            const int64_t columns = std::min<int64_t>(TILE, task.length - j);
            for (int64_t i = j; i < task.length; i += TILE) {
                const Tile tile{i, std::min<int64_t>(TILE, task.length - i), j, columns};
                for (const Channel channel : {POSITION, TIME})
                    if (shared_.has(channel)) sum_over_heads(tile, channel, task.heads, stride);
                shared_weights_.prepare(tile, gradients_[TIME], sums);
                if (shared_.tables.position()) table_gradients_.add_positions(tile, gradients_[POSITION]);
                if (shared_.tables.time()) table_gradients_.add_buckets(tile, gradients_[TIME]);
                for (int64_t h = 0; h < task.heads; h++) tile_of_head(tile, h, stride);
            }
            table_gradients_.flush();
            for (int64_t h = 0; h < task.heads; h++) {
                const Heads<float> k{g_.k, g_.k_row, g_.k_head, p_.qk_width}, v{g_.v, g_.v_row, g_.v_head, p_.v_width};
                unpack_head(grad_keys_ + h * TILE * qk_, 1, k, task, h, j, columns);
                unpack_head(grad_values_ + h * TILE * v_, 1, v, task, h, j, columns);
            }
        }
        const Heads<float> q{g_.q, g_.q_row, g_.q_head, p_.qk_width};
        for (int64_t h = 0; h < task.heads; h++)
            unpack_head(grad_queries_ + h * stride * qk_, p_.alpha, q, task, h, 0, task.length);
    }

  private:
    // alpha goes into the queries, scale into the semantic channel's incoming gradient.
    void load_head(const Task& task, int64_t h, int64_t stride) {
        float* keys = keys_ + h * stride * qk_;
        pack_head({p_.q, p_.q_row, p_.q_head, p_.qk_width}, task, h, p_.alpha, queries_ + h * stride * qk_, task.length);
        pack_head({p_.k, p_.k_row, p_.k_head, p_.qk_width}, task, h, 1, keys, padded(task.length));
        pack_transposed(keys, task.length, p_.qk_width, transposed_keys_ + h * stride * qk_);
        pack_head({p_.v, p_.v_row, p_.v_head, p_.v_width}, task, h, 1, packed_values_, padded(task.length));
        pack_transposed(packed_values_, task.length, p_.v_width, transposed_values_ + h * stride * v_);
        for (const Channel channel : {POSITION, TIME, SEMANTIC}) {
            if (!shared_.has(channel)) continue;
            const Heads<const float> from{g_.out + channel * p_.v_width, g_.out_row, g_.out_head, p_.v_width};
            pack_head(from, task, h, channel == SEMANTIC ? p_.scale : 1, incoming_[channel] + h * stride * v_, task.length);
        }
    }

    // Gradients of a tile's position or time weights, zero above the diagonal.
    void sum_over_heads(const Tile& tile, Channel channel, int64_t heads, int64_t stride) {
        float* to = gradients_[channel];
        for (int64_t h = 0; h < heads; h++) {
            const int64_t head = h * stride * v_;
            scores(tile, p_.v_width, incoming_[channel] + head, transposed_values_ + head, to, h > 0);
        }
        for (int64_t i = 0; i < tile.rows; i++) {
            const int64_t limit = tile.limit(i), whole = limit / LANES * LANES;
            if (whole < limit) store(to + i * TILE + whole, first_lanes(load(to + i * TILE + whole), limit - whole));
        }
    }

    void tile_of_head(const Tile& tile, int64_t h, int64_t stride) {
        const float* queries = queries_ + h * stride * qk_;
        const float* incoming = incoming_[SEMANTIC] + h * stride * v_;
        float* grad_queries = grad_queries_ + (h * stride + tile.first_row) * qk_;
        float* grad_values = grad_values_ + h * TILE * v_;
        const bool add = !tile.diagonal();  // a column of tiles begins on the diagonal
        scores(tile, p_.qk_width, queries, transposed_keys_ + h * stride * qk_, weights_);
        scores(tile, p_.v_width, incoming, transposed_values_ + h * stride * v_, gradients_[SEMANTIC]);
        activate(tile);
        times_rows(tile, p_.v_width, weights_, incoming, grad_values, add);
        for (const Channel channel : {POSITION, TIME})
            if (shared_.has(channel))
                times_rows(tile, p_.v_width, shared_weights_.of(channel), incoming_[channel] + h * stride * v_, grad_values, true);
        times_rows(tile, p_.qk_width, gradients_[SEMANTIC], queries, grad_keys_ + h * TILE * qk_, add);
        times_columns(
            tile, p_.qk_width, gradients_[SEMANTIC], keys_ + h * stride * qk_, grad_queries, tile.first_column > 0
        );
    }

    // Scores to SiLU of scores, gradients of the SiLU's output to those of its input.
    void activate(const Tile& tile) {
        for (int64_t i = 0; i < tile.rows; i++) {
            const int64_t limit = tile.limit(i);
            float *weights = weights_ + i * TILE, *grad = gradients_[SEMANTIC] + i * TILE;
            int64_t j = 0;
            for (; j < limit; j += LANES) {
                const Vector x = load(weights + j), gate = sigmoid(x), weight = x * gate;
                const Vector slope = load(grad + j) * (gate + weight * (1.0f - gate));
                const bool whole = j + LANES <= limit;
                store(weights + j, whole ? weight : first_lanes(weight, limit - j));
                store(grad + j, whole ? slope : first_lanes(slope, limit - j));
            }
            for (; j < padded(tile.columns); j += LANES) {
                store(weights + j, Vector{});
                store(grad + j, Vector{});
            }
        }
    }

    const Shared& shared_;
    const TurbogrFuxi& p_;
    const TurbogrFuxiGradients& g_;
    SharedWeights shared_weights_;
    TaskBiasGradients table_gradients_;
    int64_t qk_, v_, used_;
    float *incoming_[CHANNELS], *gradients_[CHANNELS];
    float *packed_values_, *queries_, *keys_, *transposed_keys_, *transposed_values_;
    float *grad_queries_, *grad_keys_, *grad_values_, *weights_;
};

}  // namespace
}  // namespace turbogr

using namespace turbogr;

int turbogr_fuxi_forward(const TurbogrFuxi* problem, float* out, int64_t out_row, int64_t out_head) {
    Shared shared(*problem);
    if (!shared.build()) return 1;
    const auto make = [&](Arena arena) { return Forward(shared, out, out_row, out_head, arena); };
    const auto run = [&](Forward& worker, int64_t t) { worker.run(shared.queue.tasks[t]); };
    return work(shared.queue, problem->threads, make, run) ? 0 : 1;
}

int turbogr_fuxi_backward(const TurbogrFuxi* problem, const TurbogrFuxiGradients* gradients) {
    Shared shared(*problem);
    if (!shared.build()) return 1;
    BiasGradients tables(shared.tables, shared.queue);
    const int64_t count = shared.queue.count;
    const Memory memory = allocate(count * static_cast<int64_t>(sizeof(TimeFunction::Sums)));
    if (!tables.build() || !memory) return 1;
    TimeFunction::Sums* sums = reinterpret_cast<TimeFunction::Sums*>(memory.get());
    const auto make = [&](Arena arena) { return Backward(shared, *gradients, arena); };
    const auto run = [&](Backward& worker, int64_t t) { worker.run(shared.queue.tasks[t], tables, t, sums + t); };
    if (!work(shared.queue, problem->threads, make, run)) return 1;
    if (shared.function()) {
        TimeFunction::Sums total{};
        for (int64_t t = 0; t < count; t++) {
            total.plain += sums[t].plain;
            total.by_power += sums[t].by_power;
            total.by_log += sums[t].by_log;
        }
        TimeFunction(problem->time_function, problem->bias.time_unit).gradient(total, gradients->time_function);
    }
    return tables.finish(gradients->position_bias, gradients->position_count, gradients->time_bias) ? 0 : 1;
}
