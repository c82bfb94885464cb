// turbogr::jagged_hstu_attention, backward. The formula stands in turbogr/ops/hstu_attention.py, the design in ../README.md.
//
// Blocks of queries give the gradients of the queries and of both tables, blocks of keys those of keys and values. Both calculate
// scores and their gradients, so that every row is summed by one core, in one order: no atomic sums between cores.

#include "kernel_operator.h"
#include "lib/matmul_intf.h"

#include "../../common/table_gradients.h"
#include "hstu_strips.h"

namespace turbogr::ascend {

struct HstuGradients {
    GM_ADDR q;
    GM_ADDR k;
    GM_ADDR v;
    GM_ADDR position_bias;
    GM_ADDR time_bias;
};

template <typename E>
class HstuBackward : HstuStrips<E> {
    using Base = HstuStrips<E>;
    using typename Base::In;
    using typename Base::Out;
    using Pairs = Product<E, false, true>;    // K Q^T, V dO^T
    using Queries = Product<E, true, false>;  // (score gradients, keys x queries)^T K
    using Keys = Product<E, false, false>;    // score gradients Q, weights dO

  public:
    typename Pairs::Type scores_product, value_grads_product;
    typename Queries::Type q_product;
    typename Keys::Type k_product, v_product;

    __aicore__ inline void init(
        AscendC::TPipe* pipe, const HstuTiling* tiling, GM_ADDR gradient, GM_ADDR q, GM_ADDR k, GM_ADDR v, GM_ADDR plan,
        const PairTables& tables, const HstuGradients& to, GM_ADDR workspace
    ) {
        const HstuTiling& t = *tiling;
        work_ = hstu_workspace(t, sizeof(E), true);
        core_ = AscendC::GetBlockIdx();
        workspace_ = workspace;
        to_ = to;
        GM_ADDR own = workspace + core_ * work_.bytes;
        out_grads_.init(gradient, t.tokens, t.heads, t.v_width);
        q_.init(q, t.tokens, t.heads, t.qk_width);
        k_.init(k, t.tokens, t.heads, t.qk_width);
        v_.init(v, t.tokens, t.heads, t.v_width);
        q_grads_.init(to.q, t.tokens, t.heads, t.qk_width);
        k_grads_.init(to.k, t.tokens, t.heads, t.qk_width);
        v_grads_.init(to.v, t.tokens, t.heads, t.v_width);
        scores_.init(own + work_.scores, 2, t.heads, TILE_PAIRS);
        value_grads_.init(own + work_.value_grads, 2, t.heads, TILE_PAIRS);
        weights_.init(own + work_.weights, 2, t.heads, TILE_PAIRS);
        score_grads_.init(own + work_.score_grads, 2, t.heads, TILE_PAIRS);
        qk_sums_.init(own + work_.sums, 1, t.heads, BLOCK_ROWS * t.qk_width);
        v_sums_.init(own + work_.second_sums, 1, t.heads, BLOCK_ROWS * t.v_width);
        plan_.SetGlobalBuffer(reinterpret_cast<__gm__ int32_t*>(plan));

        this->init_strips(pipe, tiling);
        const int64_t strip = this->strip_;
        pipe->InitBuffer(value_grads_in_, 2, static_cast<uint32_t>(strip * 4));
        pipe->InitBuffer(weights_out_, 2, static_cast<uint32_t>(strip * sizeof(E)));
        bias_.init(pipe, tables, this->scratch_, t.strip_rows, true);
        if (!bias_.some()) return;
        pipe->InitBuffer(tile_buffer_, static_cast<uint32_t>(TILE * TILE * 4));
        tile_ = tile_buffer_.Get<float>();
        if (bias_.has_position()) distances_.init(pipe, own + work_.distances, t.position_count);
        if (!bias_.has_time()) return;
        buckets_.init(pipe, t.buckets.count);
        pipe->InitBuffer(mask_buffer_, static_cast<uint32_t>(round_up(strip / 8, COPY_BYTES)));
        mask_ = mask_buffer_.Get<uint8_t>();
    }

    __aicore__ inline void run() {
        // Two plans, one behind the other: blocks of queries, then of keys. Either begins with cores + 1 numbers.
        const int64_t cores = this->tiling_->cores;
        const auto behind = static_cast<uint64_t>(cores + 1 + plan_.GetValue(static_cast<uint64_t>(cores)) * ROW_BLOCK_INTS);
        run_plan(plan_, false);
        if (bias_.has_time()) buckets_.store(workspace_ + core_ * work_.bytes + work_.buckets);
        run_plan(plan_[behind], true);
        if (!bias_.some()) return;
        AscendC::PipeBarrier<PIPE_ALL>();
        AscendC::SyncAll();
        const int64_t stride = work_.bytes / 4;
        const auto tile = this->scratch_;
        const float scale = this->tiling_->scale;
        if (bias_.has_position()) {
            const PartialSums partial{workspace_ + work_.distances + BEFORE_DISTANCES * 4, stride, cores};
            add_up<1>(
                to_.position_bias, partial, this->tiling_->position_count, scale, core_, this->scores_in_, this->out_, tile,
                table_piece());
        }
        if (bias_.has_time()) {
            const PartialSums partial{workspace_ + work_.buckets, stride, cores};
            add_up<PARTIAL_SUMS>(
                to_.time_bias, partial, this->tiling_->buckets.count, scale, core_, this->scores_in_, this->out_, tile,
                table_piece());
        }
    }

  private:
    // What a buffer of the queues holds as float32.
    __aicore__ inline int64_t table_piece() const { return this->strip_ * static_cast<int64_t>(sizeof(E)) / 4; }

    __aicore__ inline void run_plan(const AscendC::GlobalTensor<int32_t>& numbers, bool by_keys) {
        Plan plan;
        plan.init(numbers, this->tiling_->cores, core_);
        for (int64_t i = plan.begin(); i < plan.end(); i++) {
            walk_ = {plan.block(i), by_keys};
            block();
        }
    }

    __aicore__ inline void block() {
        const int64_t count = walk_.count(), heads = this->tiling_->heads;
        for (int64_t h = 0; h < heads; h++) {
            begin_pairs(0, h);
            settle();
        }
        for (int64_t i = 0; i < count; i++) {
            fence<AscendC::HardEvent::MTE3_S>(this->pipe_);  // the last tile's factors are in global memory
            squares(i, count);
        }
        fence<AscendC::HardEvent::MTE3_S>(this->pipe_);
        for (int64_t h = 0; h < heads; h++) {
            begin_sums(count - 1, h);
            settle();
        }
        const HstuTiling& t = *this->tiling_;
        const int64_t token = walk_.block.token + walk_.block.first;
        this->store_sums(qk_sums_, walk_.by_keys ? k_grads_ : q_grads_, token, walk_.rows(), t.scale * t.alpha);
        if (walk_.by_keys) this->store_sums(v_sums_, v_grads_, token, walk_.rows(), t.scale);
    }

    __aicore__ inline void squares(int64_t i, int64_t count) {
        const PairTile tile = walk_.tile(i);
        const bool tables = bias_.some() && !walk_.by_keys;
        bool first_square = true;
        for (int64_t key = tile.key; key < tile.key + tile.keys; key += TILE) {
            for (int64_t query = tile.query; query < tile.query + tile.queries; query += TILE) {
                const PairTile square{
                    key, smaller(TILE, tile.key + tile.keys - key), query, smaller(TILE, tile.query + tile.queries - query)};
                if (bias_.some()) bias_.prepare(square, walk_.block.token);
                if (tables) AscendC::Duplicate(tile_, 0.0f, static_cast<int32_t>(square.keys * TILE));
                for (int64_t h = 0; h < this->tiling_->heads; h++) {
                    if (first_square) {
                        // The cube works on the next tile's pairs and the last one's sums while the vector unit works here.
                        settle();
                        if (i + 1 < count) begin_pairs(i + 1, h);
                        if (i > 0) begin_sums(i - 1, h);
                    }
                    differentiate(i, tile, square, h);
                }
                if (tables) add_to_tables(square);
                first_square = false;
            }
        }
        settle();
    }

    // Of what the cube was told.
    __aicore__ inline void settle() {
        if (pairs_begun_) {
            scores_product.WaitIterateAll();
            value_grads_product.WaitIterateAll();
        }
        if (sums_begun_ && walk_.by_keys) {
            k_product.WaitIterateAll();
            v_product.WaitIterateAll();
        } else if (sums_begun_) {
            q_product.WaitIterateAll();
        }
        pairs_begun_ = sums_begun_ = false;
    }

    __aicore__ inline void begin_pairs(int64_t i, int64_t h) {
        const PairTile tile = walk_.tile(i);
        const int64_t key = walk_.block.token + tile.key, query = walk_.block.token + tile.query;
        post<Pairs>(
            scores_product, k_.at(key, h), q_.at(query, h), {scores_.at(i, h), walk_.stride()}, tile.keys, tile.queries, k_.width,
            false);
        post<Pairs>(
            value_grads_product, v_.at(key, h), out_grads_.at(query, h), {value_grads_.at(i, h), walk_.stride()}, tile.keys,
            tile.queries, v_.width, false);
        pairs_begun_ = true;
    }

    __aicore__ inline void begin_sums(int64_t i, int64_t h) {
        const PairTile tile = walk_.tile(i);
        const int64_t key = walk_.block.token + tile.key, query = walk_.block.token + tile.query, stride = walk_.stride();
        const Matrix<E> grads{score_grads_.at(i, h), stride};
        if (walk_.by_keys) {
            post<Keys>(
                k_product, grads, q_.at(query, h), {qk_sums_.at(0, h), q_.width}, tile.keys, q_.width, tile.queries, i > 0);
            post<Keys>(
                v_product, {weights_.at(i, h), stride}, out_grads_.at(query, h), {v_sums_.at(0, h), v_.width}, tile.keys, v_.width,
                tile.queries, i > 0);
        } else {
            const int64_t first = (tile.query - walk_.block.first) * k_.width;
            post<Queries>(
                q_product, grads, k_.at(key, h), {qk_sums_.at(0, h, first), k_.width}, tile.queries, k_.width, tile.keys, i > 0);
        }
        sums_begun_ = true;
    }

    // Gradients of the scores, without scale: value gradients times SiLU'(scores) = sigmoid (1 + scores - SiLU).
    __aicore__ inline void differentiate(int64_t i, const PairTile& tile, const PairTile& square, int64_t h) {
        using namespace AscendC;
        const int64_t strip_rows = this->tiling_->strip_rows, stride = walk_.stride();
        for (int64_t first = 0; first < square.keys; first += strip_rows) {
            const int64_t rows = smaller(strip_rows, square.keys - first);
            const int64_t element = (square.key - tile.key + first) * stride + square.query - tile.query;
            const int32_t n = static_cast<int32_t>(rows * TILE);
            const auto x = this->load_strip(this->scores_in_, scores_.at(i, h, element), stride, rows, square.queries);
            const auto value_grads =
                this->load_strip(value_grads_in_, value_grads_.at(i, h, element), stride, rows, square.queries);
            const auto denominator = this->scratch(0), weights = this->scratch(1), sigmoid = this->scratch(2);
            this->score(x, denominator, bias_, first, n);
            Div(weights, x, denominator, n);
            Duplicate(sigmoid, 1.0f, n);
            Div(sigmoid, sigmoid, denominator, n);
            Sub(x, x, weights, n);
            Adds(x, x, 1.0f, n);
            Mul(x, x, sigmoid, n);
            Mul(x, x, value_grads, n);
            value_grads_in_.FreeTensor(value_grads);
            if (square.diagonal()) clear_future(x, first, rows);
            if (walk_.by_keys) {
                if (square.diagonal()) clear_future(weights, first, rows);
                this->store(weights_out_, weights_.at(i, h, element), stride, weights, 1.0f, TILE, rows, square.queries);
            } else if (bias_.some()) {
                const auto sum = tile_[first * TILE];
                Add(sum, sum, x, n);
            }
            this->store(this->out_, score_grads_.at(i, h, element), stride, x, 1.0f, TILE, rows, square.queries);
            this->scores_in_.FreeTensor(x);
        }
    }

    __aicore__ inline void add_to_tables(const PairTile& square) {
        if (bias_.has_position()) distances_.add(tile_, square.keys, square.query - square.key);
        if (!bias_.has_time()) return;
        const int64_t strip_rows = this->tiling_->strip_rows;
        for (int64_t first = 0; first < square.keys; first += strip_rows) {
            const int64_t n = smaller(strip_rows, square.keys - first) * TILE;
            buckets_.add(tile_[first * TILE], bias_.offsets(first), n, this->scratch_, this->strip_, mask_);
        }
    }

    HstuWorkspace work_;
    int64_t core_;
    GM_ADDR workspace_;
    HstuGradients to_;
    Heads<E> q_, k_, v_, out_grads_, q_grads_, k_grads_, v_grads_;
    Slots<float> scores_, value_grads_, qk_sums_, v_sums_;
    Slots<E> weights_, score_grads_;
    AscendC::GlobalTensor<int32_t> plan_;
    TileWalk walk_;
    In value_grads_in_;
    Out weights_out_;
    PairBias bias_;
    DistanceSums distances_;
    BucketSums buckets_;
    AscendC::TBuf<AscendC::TPosition::VECCALC> tile_buffer_, mask_buffer_;
    AscendC::LocalTensor<float> tile_;
    AscendC::LocalTensor<uint8_t> mask_;
    bool pairs_begun_ = false, sums_begun_ = false;
};

template <typename E>
__aicore__ inline void hstu_backward(
    GM_ADDR gradient, GM_ADDR q, GM_ADDR k, GM_ADDR v, GM_ADDR plan, const HstuGradients& to, GM_ADDR position_bias,
    GM_ADDR time_bias, GM_ADDR query_times, GM_ADDR key_times, GM_ADDR edges, GM_ADDR workspace, GM_ADDR tiling
) {
    HstuTiling t;
    read_struct(t, tiling);
    const TCubeTiling pairs = cube_tiling(t.pairs), sums = cube_tiling(t.sums);
    AscendC::TPipe pipe;
    HstuBackward<E> kernel;
    AscendC::SetSysWorkspace(workspace);  // where a kernel is launched directly, nobody else tells
    REGIST_MATMUL_OBJ(
        &pipe, GetSysWorkSpacePtr(), kernel.scores_product, &pairs, kernel.value_grads_product, &pairs, kernel.q_product, &sums,
        kernel.k_product, &sums, kernel.v_product, &sums);
    const PairTables tables{position_bias, time_bias, query_times, key_times, edges, t.tokens, t.position_count, t.buckets};
    kernel.init(&pipe, &t, gradient, q, k, v, plan, tables, to, AscendC::GetUserWorkspace(workspace));
    kernel.run();
    kernel.scores_product.End();
    kernel.value_grads_product.End();
    kernel.q_product.End();
    kernel.k_product.End();
    kernel.v_product.End();
}

}  // namespace turbogr::ascend

// One entry for each dtype of q, k, v and their gradients; see the forward kernel. The tables' gradients are float32. The plan is
// that of blocks of queries, and behind it that of blocks of keys.
#define TURBOGR_HSTU_BACKWARD(NAME, TYPE)                                                                                       \
    extern "C" __global__ __aicore__ void NAME(                                                                                 \
        GM_ADDR gradient, GM_ADDR q, GM_ADDR k, GM_ADDR v, GM_ADDR plan, GM_ADDR position_bias, GM_ADDR time_bias,              \
        GM_ADDR query_times, GM_ADDR key_times, GM_ADDR edges, GM_ADDR grad_q, GM_ADDR grad_k, GM_ADDR grad_v,                  \
        GM_ADDR grad_position_bias, GM_ADDR grad_time_bias, GM_ADDR workspace, GM_ADDR tiling                                   \
    ) {                                                                                                                         \
        KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_MIX_AIC_1_2);                                                                      \
        turbogr::ascend::hstu_backward<TYPE>(                                                                                   \
            gradient, q, k, v, plan, {grad_q, grad_k, grad_v, grad_position_bias, grad_time_bias}, position_bias, time_bias,    \
            query_times, key_times, edges, workspace, tiling);                                                                  \
    }

TURBOGR_HSTU_BACKWARD(jagged_hstu_attention_backward_float, float)
TURBOGR_HSTU_BACKWARD(jagged_hstu_attention_backward_half, half)
TURBOGR_HSTU_BACKWARD(jagged_hstu_attention_backward_bfloat16, bfloat16_t)
