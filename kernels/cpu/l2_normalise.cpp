// Rows divided by their length, forward and backward in one pass over memory each.

#include "l2_normalise.h"

#include <cmath>

#include "elementwise.h"

using namespace turbogr;

namespace {

float length_of(const TurbogrL2Normalise& p, const float* x) {
    Vector squares{};
    columns(p.columns, [&](int64_t column, auto count) {
        const Vector v = load(x + column, count);
        squares += v * v;
    });
    return std::sqrt(quick_sum(squares));
}

}  // namespace

void turbogr_l2_normalise_forward(const TurbogrL2Normalise* problem, float* out) {
    const TurbogrL2Normalise& p = *problem;
    for_rows(p.rows, p.columns, p.threads, [&](int64_t row) {
        const float* x = p.x + row * p.x_row;
        const float length = length_of(p, x);
        const Vector inverse = broadcast(1.0f / (length < p.eps ? p.eps : length));  // a NaN stays one
        columns(p.columns, [&](int64_t column, auto count) {
            store(out + row * p.columns + column, load(x + column, count) * inverse, count);
        });
    });
}

void turbogr_l2_normalise_backward(
    const TurbogrL2Normalise* problem, const float* gradient, int64_t gradient_row, float* grad_x) {
    const TurbogrL2Normalise& p = *problem;
    for_rows(p.rows, p.columns, p.threads, [&](int64_t row) {
        const float *x = p.x + row * p.x_row, *incoming = gradient + row * gradient_row;
        const float length = length_of(p, x);
        const float inverse = 1.0f / (length < p.eps ? p.eps : length);
        Vector along{};
        columns(p.columns, [&](int64_t column, auto count) { along += load(incoming + column, count) * load(x + column, count); });
        // A row that is shorter than eps is divided by a constant: nothing of its gradient is taken away.
        const Vector share = broadcast(length < p.eps ? 0.0f : quick_sum(along) * inverse * inverse);
        columns(p.columns, [&](int64_t column, auto count) {
            const Vector across = load(incoming + column, count) - load(x + column, count) * share;
            store(grad_x + row * p.columns + column, across * broadcast(inverse), count);
        });
    });
}
