// Dropout whose mask is a function of a seed and the place of an element: forward and backward are the same function, and
// nothing is kept between them. The bits are those of random_bits.h.

#include "dropout.h"

#include "elementwise.h"
#include "random_bits.h"

using namespace turbogr;

void turbogr_dropout(const TurbogrDropout* problem) {
    const TurbogrDropout& p = *problem;
    const Mask mask{p.seed, static_cast<uint32_t>(p.threshold), p.scale};
    for_rows(p.rows, p.columns, p.threads, [&](int64_t row) {
        const RowFactors dropout(mask, row);
        const float* in = p.in + row * p.in_row;
        float* out = p.out + row * p.out_row;
        columns(p.columns, [&](int64_t column, auto count) {
            store(out + column, load(in + column, count) * dropout.at(column), count);
        });
    });
}
