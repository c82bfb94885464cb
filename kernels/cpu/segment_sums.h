// Sums of rows over segments of a list of positions, in an order that does not depend on the number of threads.
#pragma once

#include <algorithm>
#include <memory>
#include <new>

#include "rows.h"

namespace turbogr {

constexpr int64_t ROWS_AHEAD = 6;  // rows that are fetched while one is added
constexpr int64_t SEGMENTS_AHEAD = 2;  // segments that finish() is told of in advance

// Segment s sums rows order[starts[s]] to order[starts[s + 1] - 1]; without `starts`, it is row s alone.
struct Segments {
    int64_t count;
    const int64_t *order, *starts;

    int64_t begin(int64_t segment) const { return starts == nullptr ? segment : starts[segment]; }
    int64_t positions() const { return begin(count); }
};

// Where ids of [0, rows) stand: a counting sort.
class Grouping {
  public:
    // Position of the first id outside, -1 if there is none, -2 if there was no memory.
    int64_t build(const int64_t* ids, int64_t count, int64_t rows) {
        starts_.reset(new (std::nothrow) int64_t[static_cast<size_t>(rows + 2)]());
        order_.reset(new (std::nothrow) int64_t[static_cast<size_t>(count)]);
        if (!starts_ || !order_) return -2;
        int64_t* next = starts_.get() + 1;  // in the end, next[r] is where row r ends and r + 1 begins
        for (int64_t i = 0; i < count; i++) {
            if (outside(ids[i], rows)) return i;
            next[ids[i] + 1]++;
        }
        for (int64_t r = 0; r < rows; r++) next[r + 1] += next[r];
        for (int64_t i = 0; i < count; i++) order_[next[ids[i]]++] = i;
        return -1;
    }

    Segments segments(int64_t rows) const { return {rows, order_.get(), starts_.get()}; }

  private:
    std::unique_ptr<int64_t[]> starts_, order_;
};

// The work cut into pieces of about equal size, at places that depend on the segments alone. A long segment is cut itself: its
// pieces give partial sums, which are added up in their order.
class Pieces {
  public:
    struct Piece {
        int64_t first_segment, end_segment, begin, end;
        int64_t partial;  // of a long segment, else -1
    };
    struct Long {
        int64_t segment, first_partial, partials;
    };

    bool build(const Segments& s) {
        const int64_t most_long = s.positions() / LONGEST;
        const int64_t most = (s.positions() + s.count) / POSITIONS + 3 * most_long + 2;
        pieces_.reset(new (std::nothrow) Piece[static_cast<size_t>(most)]);
        longs_.reset(new (std::nothrow) Long[static_cast<size_t>(most_long)]);
        if (!pieces_ || !longs_) return false;
        int64_t first = 0;
        const auto close = [&](int64_t end) {
            if (end > first) pieces_[count++] = {first, end, s.begin(first), s.begin(end), -1};
        };
        for (int64_t x = 0, work = 0; x < s.count; x++) {
            const int64_t begin = s.begin(x), end = s.begin(x + 1);
            if (end - begin > LONGEST) {
                close(x);
                longs_[long_count++] = {x, partials, (end - begin + LONGEST - 1) / LONGEST};
                for (int64_t i = begin; i < end; i += LONGEST)
                    pieces_[count++] = {x, x + 1, i, std::min(i + LONGEST, end), partials++};
                first = x + 1, work = 0;
            } else if ((work += end - begin + 1) >= POSITIONS) {
                close(x + 1);
                first = x + 1, work = 0;
            }
        }
        close(s.count);
        return true;
    }

    const Piece& operator[](int64_t piece) const { return pieces_[piece]; }
    const Long& longs(int64_t x) const { return longs_[x]; }

    int64_t count = 0, long_count = 0, partials = 0;

  private:
    static constexpr int64_t POSITIONS = 1024, LONGEST = 4096;

    std::unique_ptr<Piece[]> pieces_;
    std::unique_ptr<Long[]> longs_;
};

static inline void add_rows(float* total, const float* a, const float* b, int64_t width) {
    columns(width, [&](int64_t c, auto count) { store(total + c, load(a + c, count) + load(b + c, count), count); });
}

static inline void copy_row(float* to, const float* from, int64_t width) {
    columns(width, [&](int64_t c, auto count) { store(to + c, load(from + c, count), count); });
}

// Hands the sum of every segment to finish(segment, sum), which has been told of it before by finish.prefetch(segment). The sum
// is null for a segment without positions. False if there was no memory.
template <typename Finish>
bool sum_segments(const Segments& s, const float* rows, int64_t stride, int64_t width, int64_t wanted_threads, const Finish& finish) {
    Pieces pieces;
    if (!pieces.build(s)) return false;
    const int threads = static_cast<int>(std::clamp<int64_t>(wanted_threads, 1, std::max<int64_t>(pieces.count, 1)));
    const int64_t padded = round_up(width, LINE);
    const std::unique_ptr<float[]> sums(new (std::nothrow) float[static_cast<size_t>((pieces.partials + threads) * padded)]);
    if (!sums) return false;
    const int64_t positions = s.positions();
    // The sum of rows [begin, end) of the order: in `total`, or where the only row stands.
    const auto sum_of = [&](int64_t begin, int64_t end, float* total) -> const float* {
        const float* only = nullptr;
        for (int64_t i = begin; i < end; i++) {
            if (i + ROWS_AHEAD < positions) prefetch(rows + s.order[i + ROWS_AHEAD] * stride, width);
            const float* row = rows + s.order[i] * stride;
            if (i == begin) {
                only = row;
            } else if (i == begin + 1) {
                add_rows(total, only, row, width);
            } else {
                add_rows(total, total, row, width);
            }
        }
        return end - begin > 1 ? total : only;
    };
    int64_t worker = 0;
#pragma omp parallel num_threads(threads)
    {
        int64_t own;
#pragma omp atomic capture
        own = worker++;
        float* total = sums.get() + (pieces.partials + own) * padded;
#pragma omp for schedule(dynamic, 1)
        for (int64_t x = 0; x < pieces.count; x++) {
            const auto& piece = pieces[x];
            if (piece.partial >= 0) {
                float* partial = sums.get() + piece.partial * padded;
                const float* sum = sum_of(piece.begin, piece.end, partial);
                if (sum != partial) copy_row(partial, sum, width);
                continue;
            }
            for (int64_t segment = piece.first_segment; segment < piece.end_segment; segment++) {
                if (segment + SEGMENTS_AHEAD < piece.end_segment) finish.prefetch(segment + SEGMENTS_AHEAD);
                finish(segment, s.order == nullptr ? rows + segment * stride : sum_of(s.begin(segment), s.begin(segment + 1), total));
            }
        }
#pragma omp for schedule(static)
        for (int64_t x = 0; x < pieces.long_count; x++) {
            const auto& whole = pieces.longs(x);
            float* sum = sums.get() + whole.first_partial * padded;
            for (int64_t p = 1; p < whole.partials; p++) add_rows(sum, sum, sum + p * padded, width);
            finish(whole.segment, sum);
        }
    }
    return true;
}

}  // namespace turbogr
