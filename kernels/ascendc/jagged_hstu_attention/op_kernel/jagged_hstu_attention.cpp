// turbogr::jagged_hstu_attention, forward. The formula stands in turbogr/ops/hstu_attention.py, the design in ../README.md.

#include "kernel_operator.h"
#include "lib/matmul_intf.h"

#include "hstu_strips.h"

namespace turbogr::ascend {

template <typename E>
class HstuForward : HstuStrips<E> {
    using Base = HstuStrips<E>;
    using Scores = Product<E, false, true>;  // K Q^T
    using Output = Product<E, true, false>;  // (weights, keys x queries)^T V

  public:
    typename Scores::Type scores_product;
    typename Output::Type output_product;

    __aicore__ inline void init(
        AscendC::TPipe* pipe, const HstuTiling* tiling, GM_ADDR q, GM_ADDR k, GM_ADDR v, GM_ADDR plan, const PairTables& tables,
        GM_ADDR out, GM_ADDR workspace
    ) {
        const HstuTiling& t = *tiling;
        const HstuWorkspace w = hstu_workspace(t, sizeof(E), false);
        const int64_t core = AscendC::GetBlockIdx();
        GM_ADDR own = workspace + core * w.bytes;
        q_.init(q, t.tokens, t.heads, t.qk_width);
        k_.init(k, t.tokens, t.heads, t.qk_width);
        v_.init(v, t.tokens, t.heads, t.v_width);
        out_rows_.init(out, t.tokens, t.heads, t.v_width);
        scores_.init(own + w.scores, 2, t.heads, TILE_PAIRS);
        weights_.init(own + w.weights, 2, t.heads, TILE_PAIRS);
        sums_.init(own + w.sums, 1, t.heads, BLOCK_ROWS * t.v_width);
        AscendC::GlobalTensor<int32_t> all;
        all.SetGlobalBuffer(reinterpret_cast<__gm__ int32_t*>(plan));
        plan_.init(all, t.cores, core);
        this->init_strips(pipe, tiling);
        bias_.init(pipe, tables, this->scratch_, t.strip_rows, false);
    }

    __aicore__ inline void run() {
        for (int64_t i = plan_.begin(); i < plan_.end(); i++) block(plan_.block(i));
    }

  private:
    __aicore__ inline void block(const RowBlock& rows) {
        walk_ = {rows, false};
        const int64_t count = walk_.count(), heads = this->tiling_->heads;
        for (int64_t h = 0; h < heads; h++) {
            begin_scores(0, h);
            settle();
        }
        for (int64_t i = 0; i < count; i++) {
            const PairTile tile = walk_.tile(i);
            fence<AscendC::HardEvent::MTE3_S>(this->pipe_);  // the last tile's weights are in global memory
            for (int64_t query = tile.query; query < tile.query + tile.queries; query += TILE) {
                const PairTile square{tile.key, tile.keys, query, smaller(TILE, tile.query + tile.queries - query)};
                if (bias_.some()) bias_.prepare(square, walk_.block.token);
                for (int64_t h = 0; h < heads; h++) {
                    if (query == tile.query) {
                        // The cube calculates the next tile's scores and the last one's output while the vector unit works here.
                        settle();
                        if (i + 1 < count) begin_scores(i + 1, h);
                        if (i > 0) begin_output(i - 1, h);
                    }
                    weigh(i, tile, square, h);
                }
            }
            settle();
        }
        fence<AscendC::HardEvent::MTE3_S>(this->pipe_);
        for (int64_t h = 0; h < heads; h++) {
            begin_output(count - 1, h);
            settle();
        }
        this->store_sums(sums_, out_rows_, rows.token + rows.first, walk_.rows(), this->tiling_->scale);
    }

    // Of what the cube was told.
    __aicore__ inline void settle() {
        if (scores_begun_) scores_product.WaitIterateAll();
        if (output_begun_) output_product.WaitIterateAll();
        scores_begun_ = output_begun_ = false;
    }

    __aicore__ inline void begin_scores(int64_t i, int64_t h) {
        const PairTile tile = walk_.tile(i);
        const int64_t token = walk_.block.token;
        post<Scores>(
            scores_product, k_.at(token + tile.key, h), q_.at(token + tile.query, h), {scores_.at(i, h), walk_.stride()}, tile.keys,
            tile.queries, k_.width, false);
        scores_begun_ = true;
    }

    __aicore__ inline void begin_output(int64_t i, int64_t h) {
        const PairTile tile = walk_.tile(i);
        post<Output>(
            output_product, {weights_.at(i, h), walk_.stride()}, v_.at(walk_.block.token + tile.key, h),
            {sums_.at(0, h, (tile.query - walk_.block.first) * v_.width), v_.width}, tile.queries, v_.width, tile.keys, i > 0);
        output_begun_ = true;
    }

    // weights = SiLU(scores)
    __aicore__ inline void weigh(int64_t i, const PairTile& tile, const PairTile& square, int64_t h) {
        const int64_t strip_rows = this->tiling_->strip_rows, stride = walk_.stride();
        for (int64_t first = 0; first < square.keys; first += strip_rows) {
            const int64_t rows = smaller(strip_rows, square.keys - first);
            const int64_t element = (square.key - tile.key + first) * stride + square.query - tile.query;
            const int32_t n = static_cast<int32_t>(rows * TILE);
            const auto x = this->load_strip(this->scores_in_, scores_.at(i, h, element), stride, rows, square.queries);
            const auto denominator = this->scratch(0), weights = this->scratch(1);
            this->score(x, denominator, bias_, first, n);
            AscendC::Div(weights, x, denominator, n);
            this->scores_in_.FreeTensor(x);
            if (square.diagonal()) clear_future(weights, first, rows);
            this->store(this->out_, weights_.at(i, h, element), stride, weights, 1.0f, TILE, rows, square.queries);
        }
    }

    Heads<E> q_, k_, v_, out_rows_;
    Slots<float> scores_, sums_;
    Slots<E> weights_;
    Plan plan_;
    TileWalk walk_;
    PairBias bias_;
    bool scores_begun_ = false, output_begun_ = false;
};

template <typename E>
__aicore__ inline void hstu_forward(
    GM_ADDR q, GM_ADDR k, GM_ADDR v, GM_ADDR plan, GM_ADDR position_bias, GM_ADDR time_bias, GM_ADDR query_times, GM_ADDR key_times,
    GM_ADDR edges, GM_ADDR out, GM_ADDR workspace, GM_ADDR tiling
) {
    HstuTiling t;
    read_struct(t, tiling);
    const TCubeTiling scores = cube_tiling(t.pairs), output = cube_tiling(t.sums);
    AscendC::TPipe pipe;
    HstuForward<E> kernel;
    AscendC::SetSysWorkspace(workspace);  // where a kernel is launched directly, nobody else tells
    REGIST_MATMUL_OBJ(&pipe, GetSysWorkSpacePtr(), kernel.scores_product, &scores, kernel.output_product, &output);
    const PairTables tables{position_bias, time_bias, query_times, key_times, edges, t.tokens, t.position_count, t.buckets};
    kernel.init(&pipe, &t, q, k, v, plan, tables, out, AscendC::GetUserWorkspace(workspace));
    kernel.run();
    kernel.scores_product.End();
    kernel.output_product.End();
}

}  // namespace turbogr::ascend

// One entry for each dtype of q, k, v and out. Tables are float32, times int64, the plan is int32 and the edges are float32
// (common/core_assignment.h, common/bucket_edges.h); absent tables, times and edges are null.
#define TURBOGR_HSTU_FORWARD(NAME, TYPE)                                                                                        \
    extern "C" __global__ __aicore__ void NAME(                                                                                 \
        GM_ADDR q, GM_ADDR k, GM_ADDR v, GM_ADDR plan, GM_ADDR position_bias, GM_ADDR time_bias, GM_ADDR query_times,           \
        GM_ADDR key_times, GM_ADDR edges, GM_ADDR out, GM_ADDR workspace, GM_ADDR tiling                                        \
    ) {                                                                                                                         \
        KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_MIX_AIC_1_2);                                                                      \
        turbogr::ascend::hstu_forward<TYPE>(                                                                                    \
            q, k, v, plan, position_bias, time_bias, query_times, key_times, edges, out, workspace, tiling);                    \
    }

TURBOGR_HSTU_FORWARD(jagged_hstu_attention_float, float)
TURBOGR_HSTU_FORWARD(jagged_hstu_attention_half, half)
TURBOGR_HSTU_FORWARD(jagged_hstu_attention_bfloat16, bfloat16_t)
