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
        columns(p.columns, [&](int64_t column, auto count) { total += load(x + column, count); });
        mean = quick_sum(total) / width;
    }
    Vector squares{};
    columns(p.columns, [&](int64_t column, auto count) {
        const Vector away = keep_first(load(x + column, count) - broadcast(mean), count);
        squares += away * away;
    });
    return {broadcast(mean), broadcast(1.0f / std::sqrt(quick_sum(squares) / width + p.eps))};
}

const float* gate_of(const TurbogrGatedNorm& p, int64_t row) {
    return p.gate == nullptr ? nullptr : p.gate + row * p.gate_row;
}

Mask mask_of(const TurbogrGatedNorm& p) { return {p.seed, static_cast<uint32_t>(p.threshold), p.scale}; }

}  // namespace
}  // namespace turbogr

using namespace turbogr;

void turbogr_gated_norm_forward(const TurbogrGatedNorm* problem, float* out) {
    const TurbogrGatedNorm& p = *problem;
    const Mask mask = mask_of(p);
    for_rows(p.rows, p.columns, p.threads, [&](int64_t row) {
        const float *x = p.x + row * p.x_row, *gate = gate_of(p, row);
        const Moments m = moments_of(p, x);
        const RowFactors dropout(mask, row);
        columns(p.columns, [&](int64_t column, auto count) {
            const Vector normed = (load(x + column, count) - m.mean) * m.inverse;
            const Vector gated = gate == nullptr ? normed : load(gate + column, count) * normed;
            store(out + row * p.columns + column, gated * dropout.at(column), count);
        });
    });
}

void turbogr_gated_norm_backward(
    const TurbogrGatedNorm* problem, const float* gradient, int64_t gradient_row, float* grad_gate, float* grad_x) {
    const TurbogrGatedNorm& p = *problem;
    const Mask mask = mask_of(p);
    for_rows(p.rows, p.columns, p.threads, [&](int64_t row) {
        const float *x = p.x + row * p.x_row, *gate = gate_of(p, row), *incoming = gradient + row * gradient_row;
        float *to_gate = gate == nullptr ? nullptr : grad_gate + row * p.columns, *to_x = grad_x + row * p.columns;
        const Moments m = moments_of(p, x);
        const RowFactors dropout(mask, row);
        Vector total{}, along{};  // of the normed row's gradient: its sum, and its product with the normed row
        columns(p.columns, [&](int64_t column, auto count) {
            const Vector normed = (load(x + column, count) - m.mean) * m.inverse;
            const Vector g = load(incoming + column, count) * dropout.at(column);
            const Vector to_normed = gate == nullptr ? g : g * load(gate + column, count);
            if (gate != nullptr) store(to_gate + column, g * normed, count);
            store(to_x + column, to_normed, count);
            total += to_normed;
            along += to_normed * normed;
        });
        const float width = static_cast<float>(p.columns);
        const Vector common = broadcast(p.centre ? quick_sum(total) / width : 0.0f), share = broadcast(quick_sum(along) / width);
        columns(p.columns, [&](int64_t column, auto count) {
            const Vector normed = (load(x + column, count) - m.mean) * m.inverse;
            store(to_x + column, (load(to_x + column, count) - common - normed * share) * m.inverse, count);
        });
    });
}
