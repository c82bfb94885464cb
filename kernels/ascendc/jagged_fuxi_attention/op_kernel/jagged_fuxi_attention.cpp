// turbogr::jagged_fuxi_attention, forward. The formula stands in turbogr/ops/fuxi_attention.py, the design in ../README.md.

#include "kernel_operator.h"
#include "lib/matmul_intf.h"

#include "fuxi_strips.h"

namespace turbogr::ascend {

template <typename E>
class FuxiForward : FuxiStrips<E> {
    using Scores = Product<E, false, true>;  // K Q^T
    using Output = Product<E, true, false>;  // (weights, keys x queries)^T V

  public:
    ProductQueue<Scores> scores_products;
    ProductQueue<Output> output_products;

    __aicore__ inline void init(
        AscendC::TPipe* pipe, const FuxiTiling* tiling, GM_ADDR q, GM_ADDR k, GM_ADDR v, GM_ADDR plan, const FuxiTables& tables,
        GM_ADDR out, GM_ADDR workspace
    ) {
        const FuxiTiling& t = *tiling;
        const FuxiWorkspace w = fuxi_workspace(t, sizeof(E), false);
        const int64_t core = AscendC::GetBlockIdx(), sums = BLOCK_ROWS * t.heads * t.v_width;
        GM_ADDR own = workspace + core * w.bytes;
        q_.init(q, t.tokens, t.heads, t.qk_width);
        k_.init(k, t.tokens, t.heads, t.qk_width);
        v_.init(v, t.tokens, t.heads, t.v_width);
        out_rows_.init(out, t.tokens, t.heads, FUXI_CHANNELS * t.v_width);
        scores_.init(own + w.scores);
        weights_.init(own + w.weights);
        shared_weights_.init(own + w.shared_weights);
        for (int64_t c = 0; c < FUXI_CHANNELS; c++) sums_[c].init(own + w.sums + c * sums * 4, t.heads, t.v_width);
        AscendC::GlobalTensor<int32_t> all;
        all.SetGlobalBuffer(reinterpret_cast<__gm__ int32_t*>(plan));
        plan_.init(all, t.cores, core);
        this->init_strips(pipe, tiling);
        pair_weights_.init(pipe, tiling, tables, this->scratch(0), this->scratch(SCRATCH_STRIPS + 1));
    }

    __aicore__ inline void run() {
        for (int64_t i = plan_.begin(); i < plan_.end(); i++) block(plan_.block(i));
    }

  private:
    __aicore__ inline void block(const RowBlock& rows) {
        this->walk_ = {rows, false};
        const TileWalk& walk = this->walk_;
        for (int64_t i = 0; i < walk.count(); i++) tile(walk.tile(i), i > 0);
        output_products.wait();
        const int64_t width = v_.width, row = (rows.token + rows.first) * out_rows_.row;
        for (int64_t c = 0; c < FUXI_CHANNELS; c++) {
            const auto to = out_rows_.data[row + c * width];
            const float factor = c == SEMANTIC_CHANNEL ? this->tiling_->scale : 1.0f;
            if (this->has(c)) this->store_sums(to, FUXI_CHANNELS * width, sums_[c], walk.rows(), factor);
            else store_zeros(to, walk.rows());
        }
    }

    // Where a tile's first query stands in the matrices of pairs, and in the sums.
    __aicore__ inline int64_t column(const PairTile& tile) const { return tile.query - this->walk_.block.first; }

    __aicore__ inline void tile(const PairTile& tile, bool add) {
        const int64_t heads = this->tiling_->heads, key = this->walk_.block.token + tile.key;
        const int64_t stride = this->walk_.stride(), origin = column(tile);
        begin_scores(tile, 0);
        if (this->some_shared()) this->store_shared_weights(pair_weights_, tile, shared_weights_, origin);
        fence<AscendC::HardEvent::MTE3_S>(this->pipe_);  // the weights are in global memory
        for (int64_t c = 0; c < FUXI_SHARED; c++) {
            if (!this->has(c)) continue;
            output_products.post(
                {shared_weights_.at(c, origin), stride}, v_.at(key, 0), sums_[c].at(origin, 0), tile.queries, v_.row, tile.keys,
                add);
        }
        for (int64_t h = 0; h < heads; h++) {
            scores_products.wait();
            const int64_t slot = step_++;
            if (h + 1 < heads) begin_scores(tile, h + 1);
            activate(tile, slot);
            fence<AscendC::HardEvent::MTE3_S>(this->pipe_);
            output_products.post(
                {weights_.at(slot, origin), stride}, v_.at(key, h), sums_[SEMANTIC_CHANNEL].at(origin, h), tile.queries,
                v_.width, tile.keys, add);
        }
    }

    // Of the head that is next.
    __aicore__ inline void begin_scores(const PairTile& tile, int64_t h) {
        const int64_t token = this->walk_.block.token;
        scores_products.post(
            k_.at(token + tile.key, h), q_.at(token + tile.query, h), {scores_.at(step_, column(tile)), this->walk_.stride()},
            tile.keys, tile.queries, k_.width, false);
    }

    // weights = SiLU(alpha q . k)
    __aicore__ inline void activate(const PairTile& tile, int64_t slot) {
        const int64_t origin = column(tile);
        for (int64_t i = 0; i < this->squares(tile); i++) {
            const PairTile s = this->square(tile, i);
            for (int64_t first = 0; first < s.keys; first += this->tiling_->strip_rows) {
                const int64_t rows = smaller(this->tiling_->strip_rows, s.keys - first);
                const int64_t place = origin + this->element(tile, s, first);
                const int32_t n = static_cast<int32_t>(rows * TILE);
                const auto x = this->load_strip(this->in_, scores_.at(slot, place), rows, s.queries);
                const auto denominator = this->scratch(0), weights = this->scratch(1);
                this->score(x, denominator, n);
                AscendC::Div(weights, x, denominator, n);
                this->in_.FreeTensor(x);
                if (s.diagonal()) clear_future(weights, first, rows);
                this->store_strip(this->out_, weights_.at(slot, place), weights, rows, s.queries);
            }
        }
    }

    // A channel that was not given.
    __aicore__ inline void store_zeros(const AscendC::GlobalTensor<E>& to, int64_t rows) {
        const int64_t width = v_.width, pitch = round_up(width, COPY_ELEMENTS<E>), most = this->strip_ / pitch;
        const int64_t blocks = rows * this->tiling_->heads, stride = FUXI_CHANNELS * width;
        const auto zeros = this->scratch(0);
        AscendC::Duplicate(zeros, 0.0f, static_cast<int32_t>(this->strip_));
        for (int64_t first = 0; first < blocks; first += most) {
            const int64_t count = smaller(most, blocks - first);
            const AscendC::LocalTensor<E> y = this->out_.template AllocTensor<E>();
            this->round(y, zeros, count * pitch);
            this->put(this->out_, y, to[first * stride], stride, pitch, count, width);
        }
    }

    Heads<E> q_, k_, v_, out_rows_;
    PairSlots<float> scores_;
    PairSlots<E> weights_, shared_weights_;
    BlockSums sums_[FUXI_CHANNELS];
    Plan plan_;
    PairWeights pair_weights_;
    int64_t step_ = 0;  // tiles times heads so far: whose parity is the slot
};

template <typename E>
__aicore__ inline void fuxi_forward(
    GM_ADDR q, GM_ADDR k, GM_ADDR v, GM_ADDR plan, const FuxiTables& tables, GM_ADDR out, GM_ADDR workspace, GM_ADDR tiling
) {
    FuxiTiling t;
    read_struct(t, tiling);
    const TCubeTiling scores = cube_tiling(t.pairs), output = cube_tiling(t.sums);
    AscendC::TPipe pipe;
    FuxiForward<E> kernel;
    AscendC::SetSysWorkspace(workspace);  // where a kernel is launched directly, nobody else tells
    REGIST_MATMUL_OBJ(
        &pipe, GetSysWorkSpacePtr(), kernel.scores_products.object, &scores, kernel.output_products.object, &output);
    kernel.init(&pipe, &t, q, k, v, plan, tables, out, AscendC::GetUserWorkspace(workspace));
    kernel.run();
    kernel.scores_products.object.End();
    kernel.output_products.object.End();
}

}  // namespace turbogr::ascend

// One entry for each dtype of q, k, v and out. Tables and the time function's numbers are float32, times int64, the plan is
// int32 and the edges are float32 (common/core_assignment.h, common/bucket_edges.h); what is absent is null.
#define TURBOGR_FUXI_FORWARD(NAME, TYPE)                                                                                       \
    extern "C" __global__ __aicore__ void NAME(                                                                                \
        GM_ADDR q, GM_ADDR k, GM_ADDR v, GM_ADDR plan, GM_ADDR position_bias, GM_ADDR time_parameters, GM_ADDR query_times,    \
        GM_ADDR key_times, GM_ADDR edges, GM_ADDR out, GM_ADDR workspace, GM_ADDR tiling                                       \
    ) {                                                                                                                        \
        KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_MIX_AIC_1_2);                                                                     \
        turbogr::ascend::fuxi_forward<TYPE>(                                                                                   \
            q, k, v, plan, {position_bias, time_parameters, query_times, key_times, edges}, out, workspace, tiling);           \
    }

TURBOGR_FUXI_FORWARD(jagged_fuxi_attention_float, float)
TURBOGR_FUXI_FORWARD(jagged_fuxi_attention_half, half)
TURBOGR_FUXI_FORWARD(jagged_fuxi_attention_bfloat16, bfloat16_t)
