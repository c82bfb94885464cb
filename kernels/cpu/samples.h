// Tokens and their samples: rows in whole vectors, the check of indices, loops over columns.
#pragma once

#include <algorithm>
#include <atomic>
#include <limits>
#include <type_traits>

#include "bfloat16.h"
#include "float16.h"
#include "matmul.h"
#include "negative_logits.h"
#include "tasks.h"
#include "vectors.h"

namespace turbogr {

constexpr int64_t TOKENS_AT_ONCE = 16;  // that a thread takes; fewer are done before another has woken up

static inline int64_t threads_of(const TurbogrSamples& p) {
    return std::clamp<int64_t>(p.threads, 1, std::max<int64_t>(p.tokens / TOKENS_AT_ONCE, 1));
}

// Rows whose width is a whole number of vectors: the caller's, or a copy.
template <typename Element = float>
struct Rows {
    const Element* data = nullptr;
    int64_t stride = 0;
    Memory copy;

    const Element* operator[](int64_t row) const { return data + row * stride; }

    bool prepare(const Element* from, int64_t from_stride, int64_t rows, int64_t width, int64_t threads) {
        data = from;
        stride = from_stride;
        if (width % LANES == 0) return true;
        stride = round_up(width, LANES);
        copy = allocate(rows * stride * static_cast<int64_t>(sizeof(Element)));
        if (!copy) return false;
        Element* to = reinterpret_cast<Element*>(copy.get());
        data = to;
#pragma omp parallel for schedule(static) num_threads(static_cast<int>(threads))
        for (int64_t row = 0; row < rows; row++) {
            std::memcpy(to + row * stride, from + row * from_stride, sizeof(Element) * width);
            std::memset(to + row * stride + width, 0, sizeof(Element) * (stride - width));
        }
        return true;
    }
};

static inline bool prepare_outputs(Rows<>& rows, const TurbogrSamples& p) {
    return rows.prepare(p.output, p.output_row, p.tokens, p.width, threads_of(p));
}

template <typename Element>
bool prepare_table(Rows<Element>& rows, const TurbogrSamples& p) {
    return rows.prepare(static_cast<const Element*>(p.table), p.table_row, p.rows, p.width, threads_of(p));
}

// Calls run() with a number of the table's type, which stands for the type alone.
template <typename Run>
int with_type(const TurbogrSamples& p, Run run) {
    switch (p.table_type) {
        case TURBOGR_FLOAT16: return run(Float16{});
        case TURBOGR_BFLOAT16: return run(BFloat16{});
        default: return run(float{});
    }
}

// The first sample that is outside the table.
class Wrong {
  public:
    void at(int64_t sample) {
        int64_t known = first_;
        while (sample < known && !first_.compare_exchange_weak(known, sample)) {}
    }
    int report(int64_t* to) const {
        *to = first_;
        return first_ == NONE ? 0 : 2;
    }

  private:
    static constexpr int64_t NONE = std::numeric_limits<int64_t>::max();
    std::atomic<int64_t> first_{NONE};
};

// Calls use(sample, row) for the first `count` samples of a token, which are its target at least; false if one is outside.
template <typename Use>
bool for_samples(const TurbogrSamples& p, int64_t token, int64_t count, Wrong& wrong, Use use) {
    const int64_t first = p.targets == nullptr ? 0 : 1;
    const int64_t* index = p.index + token * (p.count - first);
    const uint64_t rows = static_cast<uint64_t>(p.rows);
    if (first == 1) {
        if (static_cast<uint64_t>(p.targets[token]) >= rows) return wrong.at(token * p.count), false;
        use(0, p.targets[token]);
    }
    for (int64_t s = first; s < count; s++) {
        const int64_t row = index[s - first];
        if (static_cast<uint64_t>(row) >= rows) return wrong.at(token * p.count + s), false;
        use(s, row);
    }
    return true;
}

// Calls body(number of vectors, first vector) for pieces of at most eight vectors; the number is a constant.
template <typename Body>
void by_columns(int64_t vectors, Body body) {
    int64_t v = 0;
    for (; v + 8 <= vectors; v += 8) body(std::integral_constant<int, 8>{}, v);
    switch (vectors - v) {
        case 1: return body(std::integral_constant<int, 1>{}, v);
        case 2: return body(std::integral_constant<int, 2>{}, v);
        case 3: return body(std::integral_constant<int, 3>{}, v);
        case 4: return body(std::integral_constant<int, 4>{}, v);
        case 5: return body(std::integral_constant<int, 5>{}, v);
        case 6: return body(std::integral_constant<int, 6>{}, v);
        case 7: return body(std::integral_constant<int, 7>{}, v);
        default: return;
    }
}

}  // namespace turbogr
