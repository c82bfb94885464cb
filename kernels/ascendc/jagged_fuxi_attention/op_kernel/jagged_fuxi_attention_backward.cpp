// turbogr::jagged_fuxi_attention, backward. The formula stands in turbogr/ops/fuxi_attention.py, the design in ../README.md.

#include "kernel_operator.h"
#include "lib/matmul_intf.h"

#include "fuxi_strips.h"
#include "shared_gradients.h"

namespace turbogr::ascend {

template <typename E>
class FuxiBackward : FuxiStrips<E> {
    using typename FuxiStrips<E>::In;
    using typename FuxiStrips<E>::Out;
    using Pairs = Product<E, false, true>;    // K Q^T, V dO^T
    using Queries = Product<E, true, false>;  // (score gradients, keys x queries)^T K
    using Keys = Product<E, false, false>;    // score gradients Q, weights dO

  public:
    ProductQueue<Pairs> scores_products, value_grads_products;
    ProductQueue<Queries> q_products;
    ProductQueue<Keys> k_products, v_products;

    __aicore__ inline void init(
        AscendC::TPipe* pipe, const FuxiTiling* tiling, GM_ADDR gradient, GM_ADDR q, GM_ADDR k, GM_ADDR v, GM_ADDR plan,
        const FuxiTables& tables, const FuxiGradients& to, GM_ADDR workspace
    ) {
        this->init_strips(pipe, tiling);
        const FuxiTiling& t = *tiling;
        const FuxiWorkspace w = fuxi_workspace(t, sizeof(E), true);
        core_ = AscendC::GetBlockIdx();
        GM_ADDR own = workspace + core_ * w.bytes;
        out_grads_.init(gradient, t.tokens, t.heads, FUXI_CHANNELS * t.v_width);
        q_.init(q, t.tokens, t.heads, t.qk_width);
        k_.init(k, t.tokens, t.heads, t.qk_width);
        v_.init(v, t.tokens, t.heads, t.v_width);
        q_grads_.init(to.q, t.tokens, t.heads, t.qk_width);
        k_grads_.init(to.k, t.tokens, t.heads, t.qk_width);
        v_grads_.init(to.v, t.tokens, t.heads, t.v_width);
        for (int64_t c = 0; c < FUXI_SHARED && this->some_shared(); c++) {
            channel_grads_[c].init(
                workspace + t.cores * w.bytes + c * fuxi_channel_bytes(t, sizeof(E)), t.tokens, t.heads, t.v_width);
        }
        scores_.init(own + w.scores);
        value_grads_.init(own + w.value_grads);
        shared_grads_.init(own + w.shared_grads);
        weights_.init(own + w.weights);
        score_grads_.init(own + w.score_grads);
        shared_weights_.init(own + w.shared_weights);
        const int64_t values = BLOCK_ROWS * t.heads * t.v_width;
        v_sums_.init(own + w.sums, t.heads, t.v_width);
        shared_sums_.init(own + w.sums + values * 4, t.heads, t.v_width);
        qk_sums_.init(own + w.second_sums, t.heads, t.qk_width);
        plan_.SetGlobalBuffer(reinterpret_cast<__gm__ int32_t*>(plan));

        pipe->InitBuffer(value_grads_in_, 2, static_cast<uint32_t>(this->strip_ * 4));
        pipe->InitBuffer(weights_out_, 2, static_cast<uint32_t>(this->strip_ * sizeof(E)));
        pipe->InitBuffer(split_, 2, static_cast<uint32_t>(FUXI_SPLIT_BYTES));
        pair_weights_.init(pipe, tiling, tables, this->scratch(0), this->scratch(SCRATCH_STRIPS + 1));
        gradients_.init(pipe, tiling, w, workspace, to);
    }

    __aicore__ inline void run() {
        const bool shared = this->some_shared();
        if (shared) {
            split_gradient();
            AscendC::PipeBarrier<PIPE_ALL>();
            AscendC::SyncAll();
        }
        // Two plans, one behind the other: blocks of queries, then of keys. Either begins with cores + 1 numbers.
        const int64_t cores = this->tiling_->cores;
        const auto behind = static_cast<uint64_t>(cores + 1 + plan_.GetValue(static_cast<uint64_t>(cores)) * ROW_BLOCK_INTS);
        run_plan(plan_, false);
        gradients_.store();
        run_plan(plan_[behind], true);
        if (!shared) return;
        AscendC::PipeBarrier<PIPE_ALL>();
        AscendC::SyncAll();
        // What a buffer of the queues holds as float32.
        const int64_t piece = this->strip_ * static_cast<int64_t>(sizeof(E)) / 4;
        gradients_.add_up_cores(pair_weights_.function(), this->in_, this->out_, this->scratch(0), piece);
    }

  private:
    // The position and time channels of the incoming gradient, each as [tokens, heads, v_width], so that one product has all
    // heads.
    __aicore__ inline void split_gradient() {
        const int64_t width = v_.width, pitch = round_up(width, COPY_ELEMENTS<E>), stride = FUXI_CHANNELS * width;
        const int64_t most = FUXI_SPLIT_BYTES / static_cast<int64_t>(sizeof(E)) / pitch, cores = this->tiling_->cores;
        const int64_t blocks = int64_t{this->tiling_->tokens} * this->tiling_->heads, pieces = ceil_divide(blocks, most);
        for (int64_t i = pieces * core_ / cores; i < pieces * (core_ + 1) / cores; i++) {
            const int64_t first = i * most, count = smaller(most, blocks - first);
            for (int64_t c = 0; c < FUXI_SHARED; c++) {
                if (!this->has(c)) continue;
                AscendC::LocalTensor<E> x = split_.template AllocTensor<E>();
                load_rows(x, pitch, out_grads_.data[first * stride + c * width], stride, count, width);
                split_.EnQue(x);
                x = split_.template DeQue<E>();
                store_rows(channel_grads_[c].data[first * width], width, x, pitch, count, width);
                split_.FreeTensor(x);
            }
        }
    }

    __aicore__ inline void run_plan(const AscendC::GlobalTensor<int32_t>& numbers, bool by_keys) {
        Plan plan;
        plan.init(numbers, this->tiling_->cores, core_);
        for (int64_t i = plan.begin(); i < plan.end(); i++) {
            this->walk_ = {plan.block(i), by_keys};
            block();
        }
    }

    __aicore__ inline void block() {
        const TileWalk& walk = this->walk_;
        for (int64_t i = 0; i < walk.count(); i++) {
            if (walk.by_keys) tile_of_keys(walk.tile(i), i > 0);
            else tile_of_queries(walk.tile(i), i > 0);
        }
        q_products.wait();
        k_products.wait();
        v_products.wait();
        const FuxiTiling& t = *this->tiling_;
        const int64_t token = walk.block.token + walk.block.first, rows = walk.rows();
        const Heads<E>& qk_grads = walk.by_keys ? k_grads_ : q_grads_;
        this->store_sums(qk_grads.at(token, 0).data, qk_sums_.width, qk_sums_, rows, t.scale * t.alpha);
        if (!walk.by_keys) return;
        this->store_sums(
            v_grads_.at(token, 0).data, v_sums_.width, v_sums_, rows, t.scale, &value_grads_in_,
            this->some_shared() ? &shared_sums_ : nullptr);
    }

    // Where a tile's first query stands in the matrices of pairs, and in the sums of queries.
    __aicore__ inline int64_t column(const PairTile& tile) const {
        return this->walk_.by_keys ? 0 : tile.query - this->walk_.block.first;
    }

    // Gradients of queries, tables and the time function.
    __aicore__ inline void tile_of_queries(const PairTile& tile, bool add) {
        const int64_t token = this->walk_.block.token, stride = this->walk_.stride(), origin = column(tile);
        for (int64_t c = 0; c < FUXI_SHARED; c++) {
            if (!this->has(c)) continue;
            (c == POSITION_CHANNEL ? scores_products : value_grads_products).post(
                v_.at(token + tile.key, 0), channel_grads_[c].at(token + tile.query, 0), {shared_grads_.at(c, origin), stride},
                tile.keys, tile.queries, v_.row, false);
        }
        begin_pairs(tile, 0);
        for (int64_t i = 0; i < this->squares(tile) && this->some_shared(); i++) {
            differentiate_shared(tile, this->square(tile, i));
        }
        for (int64_t h = 0; h < this->tiling_->heads; h++) {
            const int64_t slot = next_pairs(tile, h);
            differentiate(tile, slot);
            fence<AscendC::HardEvent::MTE3_S>(this->pipe_);  // the score gradients are in global memory
            q_products.post(
                {score_grads_.at(slot, origin), stride}, k_.at(token + tile.key, h), qk_sums_.at(origin, h), tile.queries,
                k_.width, tile.keys, add);
        }
    }

    // Gradients of keys and values.
    __aicore__ inline void tile_of_keys(const PairTile& tile, bool add) {
        const int64_t token = this->walk_.block.token, stride = this->walk_.stride(), query = token + tile.query;
        begin_pairs(tile, 0);
        if (this->some_shared()) this->store_shared_weights(pair_weights_, tile, shared_weights_, 0);
        fence<AscendC::HardEvent::MTE3_S>(this->pipe_);
        bool add_shared = add;
        for (int64_t c = 0; c < FUXI_SHARED; c++) {
            if (!this->has(c)) continue;
            v_products.post(
                {shared_weights_.at(c, 0), stride}, channel_grads_[c].at(query, 0), shared_sums_.at(0, 0), tile.keys, v_.row,
                tile.queries, add_shared);
            add_shared = true;
        }
        for (int64_t h = 0; h < this->tiling_->heads; h++) {
            const int64_t slot = next_pairs(tile, h);
            differentiate(tile, slot);
            fence<AscendC::HardEvent::MTE3_S>(this->pipe_);
            k_products.post(
                {score_grads_.at(slot, 0), stride}, q_.at(query, h), qk_sums_.at(0, h), tile.keys, q_.width, tile.queries, add);
            v_products.post(
                {weights_.at(slot, 0), stride}, semantic_grads(query, h), v_sums_.at(0, h), tile.keys, v_.width, tile.queries,
                add);
        }
    }

    __aicore__ inline Matrix<E> semantic_grads(int64_t token, int64_t h) const {
        Matrix<E> m = out_grads_.at(token, h);
        m.data = m.data[SEMANTIC_CHANNEL * v_.width];
        return m;
    }

    // Scores, and gradients of the semantic weights, of the head that is next.
    __aicore__ inline void begin_pairs(const PairTile& tile, int64_t h) {
        const int64_t key = this->walk_.block.token + tile.key, query = this->walk_.block.token + tile.query;
        const int64_t stride = this->walk_.stride(), origin = column(tile);
        scores_products.post(
            k_.at(key, h), q_.at(query, h), {scores_.at(step_, origin), stride}, tile.keys, tile.queries, k_.width, false);
        value_grads_products.post(
            v_.at(key, h), semantic_grads(query, h), {value_grads_.at(step_, origin), stride}, tile.keys, tile.queries,
            v_.width, false);
    }

    // The slot of head h, whose pairs are there; those of the next head are begun.
    __aicore__ inline int64_t next_pairs(const PairTile& tile, int64_t h) {
        scores_products.wait();
        value_grads_products.wait();
        const int64_t slot = step_++;
        if (h + 1 < this->tiling_->heads) begin_pairs(tile, h + 1);
        return slot;
    }

    // Gradients of the scores, without scale: value gradients times SiLU'(scores) = sigmoid + SiLU - SiLU sigmoid.
    __aicore__ inline void differentiate(const PairTile& tile, int64_t slot) {
        using namespace AscendC;
        const int64_t origin = column(tile);
        for (int64_t i = 0; i < this->squares(tile); i++) {
            const PairTile s = this->square(tile, i);
            for (int64_t first = 0; first < s.keys; first += this->tiling_->strip_rows) {
                const int64_t rows = smaller(this->tiling_->strip_rows, s.keys - first);
                const int64_t place = origin + this->element(tile, s, first);
                const int32_t n = static_cast<int32_t>(rows * TILE);
                const auto x = this->load_strip(this->in_, scores_.at(slot, place), rows, s.queries);
                const auto grads = this->load_strip(value_grads_in_, value_grads_.at(slot, place), rows, s.queries);
                const auto denominator = this->scratch(0), weights = this->scratch(1), sigmoid = this->scratch(2);
                this->score(x, denominator, n);
                Div(weights, x, denominator, n);
                Duplicate(sigmoid, 1.0f, n);
                Div(sigmoid, sigmoid, denominator, n);
                Mul(x, weights, sigmoid, n);
                Sub(sigmoid, sigmoid, x, n);
                Add(sigmoid, sigmoid, weights, n);
                Mul(sigmoid, sigmoid, grads, n);
                this->in_.FreeTensor(x);
                value_grads_in_.FreeTensor(grads);
                if (s.diagonal()) clear_future(sigmoid, first, rows);
                this->store_strip(this->out_, score_grads_.at(slot, place), sigmoid, rows, s.queries);
                if (!this->walk_.by_keys) continue;
                if (s.diagonal()) clear_future(weights, first, rows);
                this->store_strip(weights_out_, weights_.at(slot, place), weights, rows, s.queries);
            }
        }
    }

    // From the gradients of a square's position and time weights, summed over heads, to those of what they are made of.
    __aicore__ inline void differentiate_shared(const PairTile& tile, const PairTile& square) {
        const int64_t origin = column(tile);
        pair_weights_.prepare_times(square, this->walk_.block.token);
        for (int64_t first = 0; first < square.keys; first += this->tiling_->strip_rows) {
            const int64_t rows = smaller(this->tiling_->strip_rows, square.keys - first);
            const int64_t place = origin + this->element(tile, square, first);
            for (int64_t c = 0; c < FUXI_SHARED; c++) {
                if (!this->has(c)) continue;
                const auto grads = this->load_strip(value_grads_in_, shared_grads_.at(c, place), rows, square.queries);
                if (square.diagonal()) clear_future(grads, first, rows);
                if (c == POSITION_CHANNEL) gradients_.keep_positions(grads, first, rows);
                else gradients_.add_times(pair_weights_, grads, this->scratch(0), this->scratch(SCRATCH_STRIPS), first, rows);
                value_grads_in_.FreeTensor(grads);
            }
        }
        if (this->has(POSITION_CHANNEL)) gradients_.add_positions(square);
    }

    int64_t core_;
    Heads<E> q_, k_, v_, out_grads_, channel_grads_[FUXI_SHARED], q_grads_, k_grads_, v_grads_;
    PairSlots<float> scores_, value_grads_, shared_grads_;
    PairSlots<E> weights_, score_grads_, shared_weights_;
    BlockSums qk_sums_, v_sums_, shared_sums_;
    AscendC::GlobalTensor<int32_t> plan_;
    In value_grads_in_;
    Out weights_out_;
    AscendC::TQueBind<AscendC::TPosition::VECIN, AscendC::TPosition::VECOUT, 1> split_;
    PairWeights pair_weights_;
    SharedGradients gradients_;
    int64_t step_ = 0;  // tiles times heads so far: whose parity is the slot
};

template <typename E>
__aicore__ inline void fuxi_backward(
    GM_ADDR gradient, GM_ADDR q, GM_ADDR k, GM_ADDR v, GM_ADDR plan, const FuxiTables& tables, const FuxiGradients& to,
    GM_ADDR workspace, GM_ADDR tiling
) {
    FuxiTiling t;
    read_struct(t, tiling);
    const TCubeTiling pairs = cube_tiling(t.pairs), sums = cube_tiling(t.sums);
    AscendC::TPipe pipe;
    FuxiBackward<E> kernel;
    AscendC::SetSysWorkspace(workspace);  // where a kernel is launched directly, nobody else tells
    REGIST_MATMUL_OBJ(
        &pipe, GetSysWorkSpacePtr(), kernel.scores_products.object, &pairs, kernel.value_grads_products.object, &pairs,
        kernel.q_products.object, &sums, kernel.k_products.object, &sums, kernel.v_products.object, &sums);
    kernel.init(&pipe, &t, gradient, q, k, v, plan, tables, to, AscendC::GetUserWorkspace(workspace));
    kernel.run();
    kernel.scores_products.object.End();
    kernel.value_grads_products.object.End();
    kernel.q_products.object.End();
    kernel.k_products.object.End();
    kernel.v_products.object.End();
}

}  // namespace turbogr::ascend

// One entry for each dtype of q, k, v and their gradients; see the forward kernel. The gradients of tables and of the time
// function's numbers are float32. The plan is that of blocks of queries, and behind it that of blocks of keys.
#define TURBOGR_FUXI_BACKWARD(NAME, TYPE)                                                                                      \
    extern "C" __global__ __aicore__ void NAME(                                                                                \
        GM_ADDR gradient, GM_ADDR q, GM_ADDR k, GM_ADDR v, GM_ADDR plan, GM_ADDR position_bias, GM_ADDR time_parameters,       \
        GM_ADDR query_times, GM_ADDR key_times, GM_ADDR edges, GM_ADDR grad_q, GM_ADDR grad_k, GM_ADDR grad_v,                 \
        GM_ADDR grad_position_bias, GM_ADDR grad_time_parameters, GM_ADDR workspace, GM_ADDR tiling                            \
    ) {                                                                                                                        \
        KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_MIX_AIC_1_2);                                                                     \
        turbogr::ascend::fuxi_backward<TYPE>(                                                                                  \
            gradient, q, k, v, plan, {position_bias, time_parameters, query_times, key_times, edges},                          \
            {grad_q, grad_k, grad_v, grad_position_bias, grad_time_parameters}, workspace, tiling);                            \
    }

TURBOGR_FUXI_BACKWARD(jagged_fuxi_attention_backward_float, float)
TURBOGR_FUXI_BACKWARD(jagged_fuxi_attention_backward_half, half)
TURBOGR_FUXI_BACKWARD(jagged_fuxi_attention_backward_bfloat16, bfloat16_t)
