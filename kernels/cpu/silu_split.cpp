// SiLU of a packed projection, written straight into its parts, and the parts' gradients gathered into the one of the packed
// matrix: neither a copy of the activated matrix nor a concatenation of gradients is ever made.

#include "silu_split.h"

#include "elementwise.h"

using namespace turbogr;

namespace {

int64_t width_of(const TurbogrSiluSplit& p) {
    int64_t width = 0;
    for (int64_t x = 0; x < p.count; x++) width += p.parts[x].columns;
    return width;
}

}  // namespace

void turbogr_silu_split_forward(const TurbogrSiluSplit* problem) {
    const TurbogrSiluSplit& p = *problem;
    for_rows(p.rows, width_of(p), p.threads, [&](int64_t row) {
        const float* packed = p.packed + row * p.packed_row;
        for (int64_t part = 0; part < p.count; packed += p.parts[part++].columns) {
            float* to = p.parts[part].data + row * p.parts[part].row;
            columns(p.parts[part].columns, [&](int64_t column, auto count) {
                const Vector x = load(packed + column, count);
                store(to + column, x * sigmoid(x), count);
            });
        }
    });
}

void turbogr_silu_split_backward(const TurbogrSiluSplit* problem, float* grad_packed) {
    const TurbogrSiluSplit& p = *problem;
    const int64_t width = width_of(p);
    for_rows(p.rows, width, p.threads, [&](int64_t row) {
        const float* packed = p.packed + row * p.packed_row;
        float* to = grad_packed + row * width;
        for (int64_t part = 0; part < p.count; part++) {
            const TurbogrPart& gradient = p.parts[part];
            const float* from = gradient.data == nullptr ? nullptr : gradient.data + row * gradient.row;
            columns(gradient.columns, [&](int64_t column, auto count) {
                const Vector x = load(packed + column, count), gate = sigmoid(x);
                const Vector incoming = from == nullptr ? Vector{} : load(from + column, count);
                store(to + column, incoming * gate * (1.0f + x * (1.0f - gate)), count);
            });
            packed += gradient.columns;
            to += gradient.columns;
        }
    });
}
