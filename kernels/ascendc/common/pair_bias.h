// Kernel side: the bias of square tiles of pairs, from a position and a time table, either of which may be missing.
#pragma once

#include "kernel_operator.h"

#include "align.h"
#include "pair_tables.h"
#include "position_rows.h"
#include "strips.h"
#include "tile_walk.h"
#include "time_pairs.h"

namespace turbogr::ascend {

// Zeros where the key is behind the query, rows first ... first + rows of a square on the diagonal.
__aicore__ inline void clear_future(const AscendC::LocalTensor<float>& strip, int64_t first, int64_t rows) {
    for (int64_t r = first == 0 ? 1 : 0; r < rows; r++) {
        AscendC::Duplicate(strip[r * TILE], 0.0f, static_cast<int32_t>(first + r));
    }
}

struct PairTables {
    GM_ADDR position_bias;
    GM_ADDR time_bias;
    GM_ADDR query_times;
    GM_ADDR key_times;
    GM_ADDR edges;
    int64_t tokens, position_count;
    Bucketing buckets;
};

class PairBias {
  public:
    // scratch: SCRATCH_STRIPS strips of strip_rows rows. keep: whether the buckets are asked for.
    __aicore__ inline void init(
        AscendC::TPipe* pipe, const PairTables& tables, const AscendC::LocalTensor<float>& scratch, int64_t strip_rows, bool keep
    ) {
        position_ = tables.position_count > 0;
        time_ = tables.buckets.count > 0;
        keep_ = keep && time_;
        strip_rows_ = strip_rows;
        scratch_ = scratch;
        if (!some()) return;
        pipe->InitBuffer(bias_buffer_, static_cast<uint32_t>(TILE * TILE * 4));
        bias_ = bias_buffer_.Get<float>();
        if (position_) rows_.init(pipe, tables.position_bias, tables.position_count);
        if (!time_) return;
        pairs_.init(pipe, tables.query_times, tables.key_times, tables.tokens, tables.edges, tables.buckets);
        const int64_t stride = edge_stride(tables.buckets.count);
        pipe->InitBuffer(table_buffer_, static_cast<uint32_t>(stride * 4));
        table_ = table_buffer_.Get<float>();
        AscendC::GlobalTensor<float> from;
        from.SetGlobalBuffer(reinterpret_cast<__gm__ float*>(tables.time_bias), static_cast<uint64_t>(tables.buckets.count));
        load_rows(table_, stride, from, 0, 1, tables.buckets.count);
        fence<AscendC::HardEvent::MTE2_V>(pipe);
        if (!keep_) return;
        pipe->InitBuffer(offsets_buffer_, static_cast<uint32_t>(TILE * TILE * 4));
        offsets_ = offsets_buffer_.Get<float>();
    }

    __aicore__ inline bool some() const { return position_ || time_; }
    __aicore__ inline bool has_position() const { return position_; }
    __aicore__ inline bool has_time() const { return time_; }

    // token: of the sequence's first one.
    __aicore__ inline void prepare(const PairTile& square, int64_t token) {
        if (position_) rows_.prepare(square.query - square.key);
        if (time_) pairs_.prepare(token + square.key, square.keys, token + square.query, square.queries);
        for (int64_t first = 0; first < square.keys; first += strip_rows_) {
            const int64_t rows = smaller(strip_rows_, square.keys - first);
            if (time_) look_up(first, rows);
            for (int64_t r = first; position_ && r < first + rows; r++) {
                const auto to = bias_[r * TILE];
                if (time_) AscendC::Add(to, to, rows_.row(r), TILE);
                else AscendC::Adds(to, rows_.row(r), 0.0f, TILE);
            }
        }
    }

    // From row r on, TILE columns each.
    __aicore__ inline AscendC::LocalTensor<float> bias(int64_t r) const { return bias_[r * TILE]; }
    __aicore__ inline AscendC::LocalTensor<float> offsets(int64_t r) const { return offsets_[r * TILE]; }

  private:
    __aicore__ inline void look_up(int64_t first, int64_t rows) {
        const int64_t strip = strip_rows_ * TILE;
        const int32_t n = static_cast<int32_t>(rows * TILE);
        // The bias itself is written last: until then its place holds the offsets.
        const auto to = bias(first);
        const auto offsets = to.ReinterpretCast<int32_t>();
        pairs_.buckets(offsets, scratch_, strip, first, rows);
        if (keep_) AscendC::Cast(this->offsets(first), offsets, AscendC::RoundMode::CAST_RINT, n);
        AscendC::Gather(scratch_, table_, offsets.ReinterpretCast<uint32_t>(), 0u, static_cast<uint32_t>(n));
        AscendC::Adds(to, scratch_, 0.0f, n);
    }

    bool position_, time_, keep_;
    int64_t strip_rows_;
    PositionRows rows_;
    TimePairs pairs_;
    AscendC::LocalTensor<float> scratch_, bias_, table_, offsets_;
    AscendC::TBuf<AscendC::TPosition::VECIN> table_buffer_;
    AscendC::TBuf<AscendC::TPosition::VECCALC> bias_buffer_, offsets_buffer_;
};

}  // namespace turbogr::ascend
