// How row optimizers update one row of a table and its state, given the row's gradient. The formulas stand in
// turbogr/ops/row_update.py.
#pragma once

#include "embedding.h"
#include "rows.h"

namespace turbogr {

struct SGD {
    explicit SGD(const TurbogrRowUpdate& p) : lr(static_cast<float>(p.lr)) {}

    void operator()(float* weight, float*, float*, const float* gradient, int64_t width) const {
        columns(width, [&](int64_t c, auto count) {
            store(weight + c, load(weight + c, count) - lr * load(gradient + c, count), count);
        });
    }

    float lr;
};

struct AdaGrad {
    explicit AdaGrad(const TurbogrRowUpdate& p) : lr(static_cast<float>(p.lr)), eps(static_cast<float>(p.eps)) {}

    void operator()(float* weight, float* sum, float*, const float* gradient, int64_t width) const {
        columns(width, [&](int64_t c, auto count) {
            const Vector g = load(gradient + c, count), total = load(sum + c, count) + g * g;
            store(sum + c, total, count);
            store(weight + c, load(weight + c, count) - lr * (g / (square_root(total) + eps)), count);
        });
    }

    float lr, eps;
};

struct RowWiseAdaGrad {
    explicit RowWiseAdaGrad(const TurbogrRowUpdate& p) : lr(static_cast<float>(p.lr)), eps(static_cast<float>(p.eps)) {}

    void operator()(float* weight, float* sum_of_row, float*, const float* gradient, int64_t width) const {
        Vector squares{};
        columns(width, [&](int64_t c, auto count) { squares += load(gradient + c, count) * load(gradient + c, count); });
        *sum_of_row += sum(squares) / static_cast<float>(width);
        const float root = std::sqrt(*sum_of_row) + eps;
        columns(width, [&](int64_t c, auto count) {
            store(weight + c, load(weight + c, count) - lr * (load(gradient + c, count) / root), count);
        });
    }

    float lr, eps;
};

struct LazyAdam {
    explicit LazyAdam(const TurbogrRowUpdate& p)
        : lr(static_cast<float>(p.lr)), eps(static_cast<float>(p.eps)), first_share(static_cast<float>(1 - p.beta1)),
          second_decay(static_cast<float>(p.beta2)), second_share(static_cast<float>(1 - p.beta2)),
          weight_decay(static_cast<float>(p.weight_decay)), correction(static_cast<float>(p.correction)) {}

    void operator()(float* weight, float* mean, float* square, const float* gradient, int64_t width) const {
        columns(width, [&](int64_t c, auto count) {
            const Vector g = load(gradient + c, count), w = load(weight + c, count), before = load(mean + c, count);
            const Vector m = before + first_share * (g - before);
            const Vector s = second_decay * load(square + c, count) + second_share * g * g;
            store(mean + c, m, count);
            store(square + c, s, count);
            const Vector update = correction * m / (square_root(s) + eps) + weight_decay * w;
            store(weight + c, w - lr * update, count);
        });
    }

    float lr, eps, first_share, second_decay, second_share, weight_decay, correction;
};

}  // namespace turbogr
