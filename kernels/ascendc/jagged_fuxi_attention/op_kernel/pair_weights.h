// Kernel side: position and time weights of square tiles of pairs, which all heads share, and the gradients of what they are
// made of. A square has a key in each row and a query in each column (common/position_rows.h, common/time_pairs.h).
#pragma once

#include "kernel_operator.h"

#include "../../common/pair_bias.h"
#include "../../common/position_rows.h"
#include "../../common/strips.h"
#include "../../common/tile_walk.h"
#include "../../common/time_pairs.h"
#include "../op_host/jagged_fuxi_attention_tiling.h"
#include "time_function.h"

namespace turbogr::ascend {

// The tables' addresses; time_parameters are the table by bucket, or the numbers of the time function.
struct FuxiTables {
    GM_ADDR position_bias;
    GM_ADDR time_parameters;
    GM_ADDR query_times;
    GM_ADDR key_times;
    GM_ADDR edges;
};

class PairWeights {
  public:
    // scratch: SCRATCH_STRIPS strips and one more, for what is worked out besides the result.
    __aicore__ inline void init(
        AscendC::TPipe* pipe, const FuxiTiling* tiling, const FuxiTables& tables, const AscendC::LocalTensor<float>& scratch,
        const AscendC::LocalTensor<float>& more
    ) {
        tiling_ = tiling;
        scratch_ = scratch;
        more_ = more;
        strip_ = tiling->strip_rows * TILE;
        if (tiling->has_position()) rows_.init(pipe, tables.position_bias, tiling->position_count);
        if (!tiling->has_time()) return;
        pairs_.init(pipe, tables.query_times, tables.key_times, tiling->tokens, tables.edges, tiling->buckets);
        if (tiling->time_kind == TIME_FUNCTION) {
            function_.init(pipe, tables.time_parameters, tiling->buckets.inverse_unit);
            return;
        }
        const int64_t count = tiling->buckets.count, stride = edge_stride(count);
        pipe->InitBuffer(table_buffer_, static_cast<uint32_t>(stride * 4));
        table_ = table_buffer_.Get<float>();
        AscendC::GlobalTensor<float> from;
        from.SetGlobalBuffer(reinterpret_cast<__gm__ float*>(tables.time_parameters), static_cast<uint64_t>(count));
        load_rows(table_, stride, from, 0, 1, count);
        fence<AscendC::HardEvent::MTE2_V>(pipe);
    }

    // token: of the sequence's first one.
    __aicore__ inline void prepare(const PairTile& square, int64_t token) {
        if (tiling_->has_position()) rows_.prepare(square.query - square.key);
        prepare_times(square, token);
    }
    // The same without the position weights.
    __aicore__ inline void prepare_times(const PairTile& square, int64_t token) {
        if (tiling_->has_time()) pairs_.prepare(token + square.key, square.keys, token + square.query, square.queries);
    }

    // TILE columns; 0 where the key is behind the query.
    __aicore__ inline AscendC::LocalTensor<float> position_row(int64_t r) const { return rows_.row(r); }

    // Rows first ... first + rows of the square.
    __aicore__ inline void time_strip(const AscendC::LocalTensor<float>& to, int64_t first, int64_t rows) {
        const int32_t n = static_cast<int32_t>(rows * TILE);
        if (tiling_->time_kind == TIME_FUNCTION) {
            const TimeFunctionParts parts = function_parts(to, first, rows);
            AscendC::Muls(to, parts.decayed, function_.amplitude(), n);
            return;
        }
        const auto offsets = more_.ReinterpretCast<int32_t>();
        pairs_.buckets(offsets, scratch_, strip_, first, rows);
        AscendC::Gather(to, table_, offsets.ReinterpretCast<uint32_t>(), 0u, static_cast<uint32_t>(n));
    }

    // The buckets of these rows' pairs as float32 offsets in bytes; with a time table.
    __aicore__ inline void offset_strip(const AscendC::LocalTensor<float>& to, int64_t first, int64_t rows) {
        const auto offsets = more_.ReinterpretCast<int32_t>();
        pairs_.buckets(offsets, scratch_, strip_, first, rows);
        AscendC::Cast(to, offsets, AscendC::RoundMode::CAST_RINT, static_cast<uint32_t>(rows * TILE));
    }

    // With a time function; what `to` holds afterwards is parts.decayed.
    __aicore__ inline TimeFunctionParts function_parts(const AscendC::LocalTensor<float>& to, int64_t first, int64_t rows) {
        pairs_.differences(to, scratch_, strip_, first, rows);
        const TimeFunctionParts parts{to, strip(3), strip(4)};
        function_.evaluate(parts, strip(5), static_cast<int32_t>(rows * TILE));
        return parts;
    }

    __aicore__ inline const TimeFunction& function() const { return function_; }

  private:
    __aicore__ inline AscendC::LocalTensor<float> strip(int64_t i) const { return scratch_[i * strip_]; }

    const FuxiTiling* tiling_;
    int64_t strip_;
    PositionRows rows_;
    TimePairs pairs_;
    TimeFunction function_;
    AscendC::TBuf<AscendC::TPosition::VECCALC> table_buffer_;
    AscendC::LocalTensor<float> scratch_, more_, table_;
};

}  // namespace turbogr::ascend
