// gate * norm(x) with dropout, forward and backward in one pass over memory each: a row stays in the cache while its moments are
// found and used, so that nothing but the inputs has to be kept for backward. The formula stands in turbogr/ops/gated_norm.py.

#include "gated_norm.h"

#include <cmath>

#include "elementwise.h"
#include "random_bits.h"

namespace turbogr {
namespace {

struct Moments {
    Vector mean, inverse;  // 1 / deviation
};

Moments moments_of(const TurbogrGatedNorm& p, const float* x) {
    const float width = static_cast<float>(p.columns);
    float mean = 0;
    if (p.centre) {
        Vector total{};
        for_columns(p.columns, [&](int64_t column, auto count) { total += load_first(x + column, count); });
        mean = sum(total) / width;
    }
    Vector squares{};
    for_columns(p.columns, [&](int64_t column, auto count) {
        const Vector away = keep_first(load_first(x + column, count) - broadcast(mean), count);
        squares += away * away;
    });
    return {broadcast(mean), broadcast(1.0f / std::sqrt(sum(squares) / width + p.eps))};
}

// What dropout multiplies a row's elements with.
class Factors {
  public:
    Factors(const TurbogrGatedNorm& p, int64_t row)
        : mask_{p.seed, static_cast<uint32_t>(p.threshold), p.scale}, keys_(keys_of(p.seed, static_cast<uint64_t>(row))) {}
    Vector at(int64_t column) const { return mask_.threshold == 0 ? broadcast(1.0f) : factors(mask_, keys_, column); }

  private:
    Mask mask_;
    Keys keys_;
};

}  // namespace
}  // namespace turbogr

using namespace turbogr;

void turbogr_gated_norm_forward(const TurbogrGatedNorm* problem, float* out) {
    const TurbogrGatedNorm& p = *problem;
    for_rows(p.rows, p.columns, p.threads, [&](int64_t row) {
        const float *x = p.x + row * p.x_row, *gate = p.gate + row * p.gate_row;
        const Moments m = moments_of(p, x);
        const Factors dropout(p, row);
        for_columns(p.columns, [&](int64_t column, auto count) {
            const Vector normed = (load_first(x + column, count) - m.mean) * m.inverse;
            const Vector gated = load_first(gate + column, count) * normed * dropout.at(column);
            store_first(out + row * p.columns + column, gated, count);
        });
    });
}

void turbogr_gated_norm_backward(
    const TurbogrGatedNorm* problem, const float* gradient, int64_t gradient_row, float* grad_gate, float* grad_x) {
    const TurbogrGatedNorm& p = *problem;
    for_rows(p.rows, p.columns, p.threads, [&](int64_t row) {
        const float *x = p.x + row * p.x_row, *gate = p.gate + row * p.gate_row, *incoming = gradient + row * gradient_row;
        float *to_gate = grad_gate + row * p.columns, *to_x = grad_x + row * p.columns;
        const Moments m = moments_of(p, x);
        const Factors dropout(p, row);
        Vector total{}, along{};  // of the normed row's gradient: its sum, and its product with the normed row
        for_columns(p.columns, [&](int64_t column, auto count) {
            const Vector normed = (load_first(x + column, count) - m.mean) * m.inverse;
            const Vector g = load_first(incoming + column, count) * dropout.at(column);
            const Vector to_normed = g * load_first(gate + column, count);
            store_first(to_gate + column, g * normed, count);
            store_first(to_x + column, to_normed, count);
            total += to_normed;
            along += to_normed * normed;
        });
        const float width = static_cast<float>(p.columns);
        const Vector common = broadcast(p.centre ? sum(total) / width : 0.0f), share = broadcast(sum(along) / width);
        for_columns(p.columns, [&](int64_t column, auto count) {
            const Vector normed = (load_first(x + column, count) - m.mean) * m.inverse;
            store_first(to_x + column, (load_first(to_x + column, count) - common - normed * share) * m.inverse, count);
        });
    });
}
