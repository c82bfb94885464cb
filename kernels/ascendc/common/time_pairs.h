// Kernel side: time differences of the pairs of a square tile, their buckets, and sums by bucket. See limbs.h for the arithmetic.
//
// A tile has a key in each row and a query in each column. Of its times, only a row's key is read by the scalar unit; limbs,
// differences, the guess and the comparison that mends it are vector instructions on whole strips of rows. So are the sums of the
// table's gradient: for each bucket that a strip has, Compare, Select, and additions of halves until 8 numbers are left, which are
// added to the bucket's 8 partial sums.
#pragma once

#include "kernel_operator.h"

#include "align.h"
#include "limbs.h"
#include "pair_tables.h"
#include "strips.h"

namespace turbogr::ascend {

class TimePairs {
  public:
    // edges: `bucket_edges`, or nothing where buckets.count is 0.
    __aicore__ inline void init(
        AscendC::TPipe* pipe, GM_ADDR query_times, GM_ADDR key_times, int64_t tokens, GM_ADDR edges, const Bucketing& buckets
    ) {
        pipe_ = pipe;
        buckets_ = buckets;
        query_times_.SetGlobalBuffer(reinterpret_cast<__gm__ uint32_t*>(query_times), static_cast<uint64_t>(2 * tokens));
        key_times_.SetGlobalBuffer(reinterpret_cast<__gm__ uint32_t*>(key_times), static_cast<uint64_t>(2 * tokens));
        pipe->InitBuffer(words_buffer_, static_cast<uint32_t>(TIME_WORDS_BYTES));
        pipe->InitBuffer(limbs_buffer_, static_cast<uint32_t>(TIME_LIMBS_BYTES));
        query_words_ = words_buffer_.Get<uint32_t>();
        key_words_ = query_words_[2 * TILE];
        const auto numbers = limbs_buffer_.Get<float>();
        for (int i = 0; i < 3; i++) limbs_[i] = numbers[i * TILE];
        first_words_ = numbers[3 * TILE].ReinterpretCast<int32_t>();
        places_ = numbers[4 * TILE].ReinterpretCast<int32_t>();
        low_ = numbers[5 * TILE].ReinterpretCast<uint32_t>();
        high_ = numbers[6 * TILE].ReinterpretCast<uint32_t>();
        middle_ = numbers[7 * TILE].ReinterpretCast<uint32_t>();
        bits_ = numbers[8 * TILE].ReinterpretCast<uint32_t>();
        AscendC::CreateVecIndex(first_words_, static_cast<int32_t>(0), static_cast<uint32_t>(TILE));
        AscendC::Muls(first_words_, first_words_, static_cast<int32_t>(8), TILE);
        if (buckets_.count == 0) return;
        const int64_t stride = edge_stride(buckets_.count);
        pipe->InitBuffer(edges_buffer_, static_cast<uint32_t>(LIMBS * stride * 4));
        AscendC::GlobalTensor<float> from;
        from.SetGlobalBuffer(reinterpret_cast<__gm__ float*>(edges), static_cast<uint64_t>(LIMBS * stride));
        const auto to = edges_buffer_.Get<float>();
        AscendC::DataCopy(to, from, static_cast<uint32_t>(LIMBS * stride));
        for (int i = 0; i < 3; i++) edges_[i] = to[i * stride];
        fence<AscendC::HardEvent::MTE2_V>(pipe_);
    }

    // The tile whose first key and query are these tokens. Columns behind the last query repeat it.
    __aicore__ inline void prepare(int64_t key_token, int64_t keys, int64_t query_token, int64_t queries) {
        using namespace AscendC;
        fence<HardEvent::V_MTE2>(pipe_);
        fence<HardEvent::S_MTE2>(pipe_);
        load_rows(query_words_, 2 * TILE, query_times_[2 * query_token], 0, 1, 2 * queries);
        load_rows(key_words_, 2 * TILE, key_times_[2 * key_token], 0, 1, 2 * keys);
        fence<HardEvent::MTE2_V>(pipe_);
        fence<HardEvent::MTE2_S>(pipe_);
        constexpr int32_t n = TILE;
        Mins(places_, first_words_, static_cast<int32_t>(8 * (queries - 1)), n);
        const auto places = places_.ReinterpretCast<uint32_t>();
        Gather(low_, query_words_, places, 0u, n);
        Gather(high_, query_words_, places, 4u, n);
        // Bits 22 to 31 of the low word and 0 to 11 of the high one, bits 0 to 21 of the low, bits 12 to 31 of the high, with sign.
        ShiftRight(middle_, low_, static_cast<uint32_t>(LIMB_BITS), n);
        ShiftLeft(bits_, high_, 20u, n);
        ShiftRight(bits_, bits_, static_cast<uint32_t>(LIMB_BITS - 12), n);
        const auto middle = middle_.ReinterpretCast<int32_t>();
        Add(middle, middle, bits_.ReinterpretCast<int32_t>(), n);
        Cast(limbs_[1], middle, RoundMode::CAST_RINT, n);
        ShiftLeft(low_, low_, static_cast<uint32_t>(32 - LIMB_BITS), n);
        ShiftRight(low_, low_, static_cast<uint32_t>(32 - LIMB_BITS), n);
        Cast(limbs_[0], low_.ReinterpretCast<int32_t>(), RoundMode::CAST_RINT, n);
        const auto high = high_.ReinterpretCast<int32_t>();
        ShiftRight(high, high, static_cast<int32_t>(2 * LIMB_BITS - 32), n);
        Cast(limbs_[2], high, RoundMode::CAST_RINT, n);
    }

    // float32 of query time - key time, rows first ... first + rows of the tile, TILE columns each. `scratch` are SCRATCH_STRIPS
    // strips, of which the first three keep the limbs of the differences.
    __aicore__ inline void differences(
        const AscendC::LocalTensor<float>& to, const AscendC::LocalTensor<float>& scratch, int64_t strip, int64_t first,
        int64_t rows
    ) const {
        using namespace AscendC;
        const LocalTensor<float> low = scratch, middle = scratch[strip],
                                 high = scratch[2 * strip];
        const auto keys = key_words_.ReinterpretCast<int64_t>();
        for (int64_t r = 0; r < rows; r++) {
            const Limbs key = limbs_of(keys.GetValue(static_cast<uint32_t>(first + r)));
            const uint32_t row = static_cast<uint32_t>(r * TILE);
            Adds(low[row], limbs_[0], -key.low, TILE);
            Adds(middle[row], limbs_[1], -key.middle, TILE);
            Adds(high[row], limbs_[2], -key.high, TILE);
        }
        evaluate(to, low, middle, high, static_cast<int32_t>(rows * TILE));
    }

    // The buckets of these rows' pairs, times 4: offsets in bytes into a float32 table.
    __aicore__ inline void buckets(
        const AscendC::LocalTensor<int32_t>& to, const AscendC::LocalTensor<float>& scratch, int64_t strip, int64_t first,
        int64_t rows
    ) const {
        using namespace AscendC;
        const int32_t n = static_cast<int32_t>(rows * TILE);
        const LocalTensor<float> sign = scratch[3 * strip], guess = scratch[4 * strip],
                                 edge = scratch[5 * strip];
        differences(sign, scratch, strip, first, rows);
        Abs(guess, sign, n);
        Muls(guess, guess, buckets_.inverse_unit, n);
        Maxs(guess, guess, 1.0f, n);
        Ln(guess, guess, n);
        Muls(guess, guess, buckets_.per_logarithm, n);
        Adds(guess, guess, -buckets_.margin, n);
        Maxs(guess, guess, 0.0f, n);
        Mins(guess, guess, static_cast<float>(buckets_.count - 1), n);
        Cast(to, guess, RoundMode::CAST_FLOOR, n);
        Muls(to, to, static_cast<int32_t>(4), n);
        // Sign of the difference, or 0: it is a whole number.
        Mins(sign, sign, 1.0f, n);
        Maxs(sign, sign, -1.0f, n);
        for (int i = 0; i < 3; i++) {
            const LocalTensor<float> limb = scratch[i * strip];
            Gather(edge, edges_[i], to.ReinterpretCast<uint32_t>(), 0u, static_cast<uint32_t>(n));
            Mul(edge, edge, sign, n);
            Sub(limb, limb, edge, n);
        }
        // How far the gap is above the largest one of the guessed bucket: 1 more bucket if at all.
        evaluate(guess, scratch, scratch[strip], scratch[2 * strip], n);
        Mul(guess, guess, sign, n);
        Maxs(guess, guess, 0.0f, n);
        Mins(guess, guess, 1.0f, n);
        Muls(guess, guess, 4.0f, n);
        const auto more = edge.ReinterpretCast<int32_t>();
        Cast(more, guess, RoundMode::CAST_RINT, n);
        Add(to, to, more, n);
    }

  private:
    // (high * base + middle) * base + low. The sign is exact, and so is 0: where the first sum is rounded, the rest cannot change
    // its sign.
    static __aicore__ inline void evaluate(
        const AscendC::LocalTensor<float>& to, const AscendC::LocalTensor<float>& low, const AscendC::LocalTensor<float>& middle,
        const AscendC::LocalTensor<float>& high, int32_t n
    ) {
        AscendC::Muls(to, high, LIMB_BASE, n);
        AscendC::Add(to, to, middle, n);
        AscendC::Muls(to, to, LIMB_BASE, n);
        AscendC::Add(to, to, low, n);
    }

    AscendC::TPipe* pipe_;
    Bucketing buckets_;
    AscendC::GlobalTensor<uint32_t> query_times_, key_times_;  // two words a time
    AscendC::TBuf<AscendC::TPosition::VECIN> words_buffer_, edges_buffer_;
    AscendC::TBuf<AscendC::TPosition::VECCALC> limbs_buffer_;
    AscendC::LocalTensor<uint32_t> query_words_, key_words_, low_, high_, middle_, bits_;
    AscendC::LocalTensor<int32_t> first_words_, places_;
    AscendC::LocalTensor<float> limbs_[3], edges_[3];
};

// A core's sums by bucket: PARTIAL_SUMS each, in local memory until the core is done.
class BucketSums {
  public:
    __aicore__ inline void init(AscendC::TPipe* pipe, int64_t count) {
        pipe_ = pipe;
        count_ = count;
        pipe->InitBuffer(sums_buffer_, static_cast<uint32_t>(bucket_sums(count) * 4));
        pipe->InitBuffer(range_buffer_, static_cast<uint32_t>(2 * COPY_BYTES));
        sums_ = sums_buffer_.Get<float>();
        range_ = range_buffer_.Get<float>();
        AscendC::Duplicate(sums_, 0.0f, static_cast<int32_t>(bucket_sums(count)));
    }

    // offsets: TimePairs::buckets as float32; n a multiple of TILE; mask has a bit for each of them.
    __aicore__ inline void add(
        const AscendC::LocalTensor<float>& values, const AscendC::LocalTensor<float>& offsets, int64_t n,
        const AscendC::LocalTensor<float>& scratch, int64_t strip, const AscendC::LocalTensor<uint8_t>& mask
    ) {
        using namespace AscendC;
        const LocalTensor<float> chosen = scratch, work = scratch[strip];
        const int32_t count = static_cast<int32_t>(n);
        ReduceMin(range_, offsets, work, count);
        ReduceMax(range_[PARTIAL_SUMS], offsets, work, count);
        fence<HardEvent::V_S>(pipe_);
        const float low = range_.GetValue(0), high = range_.GetValue(PARTIAL_SUMS);
        for (float offset = low; offset <= high; offset += 4.0f) {
            int64_t left = n / 2;
            if (low == high) {
                Add(chosen, values, values[left], static_cast<int32_t>(left));
            } else {
                CompareScalar(mask, offsets, offset, CMPMODE::EQ, static_cast<uint32_t>(n));
                Select(chosen, mask, values, 0.0f, SELMODE::VSEL_TENSOR_SCALAR_MODE, static_cast<uint32_t>(n));
                left = n;
            }
            while (left > PARTIAL_SUMS) {
                const int64_t half = round_up(ceil_divide(left, 2), PARTIAL_SUMS);
                Add(chosen, chosen, chosen[half], static_cast<int32_t>(left - half));
                left = half;
            }
            const auto sum = sums_[static_cast<uint32_t>(offset) / 4 * static_cast<uint32_t>(PARTIAL_SUMS)];
            Add(sum, sum, chosen, static_cast<int32_t>(PARTIAL_SUMS));
        }
    }

    // To the core's place in global memory, float [count, PARTIAL_SUMS].
    __aicore__ inline void store(GM_ADDR to) {
        AscendC::GlobalTensor<float> place;
        place.SetGlobalBuffer(reinterpret_cast<__gm__ float*>(to), static_cast<uint64_t>(bucket_sums(count_)));
        fence<AscendC::HardEvent::V_MTE3>(pipe_);
        AscendC::DataCopy(place, sums_, static_cast<uint32_t>(bucket_sums(count_)));
    }

  private:
    AscendC::TPipe* pipe_;
    int64_t count_;
    AscendC::TBuf<AscendC::TPosition::VECOUT> sums_buffer_;
    AscendC::TBuf<AscendC::TPosition::VECCALC> range_buffer_;
    AscendC::LocalTensor<float> sums_, range_;
};

}  // namespace turbogr::ascend
