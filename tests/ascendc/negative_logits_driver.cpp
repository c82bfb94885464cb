// Calls both kernels of negative_logits, and what their tiling tells. See build.py.

#include "kernel_operator.h"

#include "host/driver.h"

#include <vector>

#include "kernels.h"
#include "negative_logits/op_host/negative_logits_tiling.h"

TURBOGR_KERNEL(negative_logits, 6);
TURBOGR_KERNEL(negative_logits_backward, 11);

namespace {

using namespace turbogr::ascend;

constexpr int64_t FLOAT = 0, HALF = 1;

// As tests/ascendc/negatives.py fills it.
struct Problem {
    int64_t dtype, tokens, samples, rows, width, cores, seed;

    int64_t bytes() const { return dtype == FLOAT ? 4 : 2; }
    int64_t pairs() const { return tokens * samples; }
    NegativeTiling tiling() const {
        NegativeTiling t;
        const char* error = negative_tiling(t, {tokens, samples, rows, width, bytes(), cores});
        if (error != nullptr) throw std::invalid_argument(error);
        return t;
    }
};

GM_ADDR address(const void* pointer) { return static_cast<GM_ADDR>(const_cast<void*>(pointer)); }

}  // namespace

extern "C" void negative_forward(
    const Problem* problem, const void* output, const void* rows, const int64_t* index, void* logits, host::Outcome* outcome
) {
    host::report(outcome, [&] {
        const Problem& p = *problem;
        NegativeTiling tiling = p.tiling();
        const auto outputs = host::global(output, p.tokens * p.width * p.bytes());
        const auto table = host::global(rows, p.rows * p.width * p.bytes());
        const auto indices = host::global(index, p.pairs() * 8);
        const auto numbers = host::global(&tiling, sizeof tiling);
        const auto result = host::unwritten(logits, p.pairs() * p.bytes());
        const host::Workspace workspace(negative_workspace_bytes(tiling, false));
        const auto run = [&](auto kernel) {
            return host::launch(p.cores, [&] {
                kernel(address(output), address(rows), address(index), address(logits), workspace.data(), address(&tiling));
            }, {p.seed});
        };
        const host::Counters counters = p.dtype == FLOAT  ? run(negative_logits_float)
                                        : p.dtype == HALF ? run(negative_logits_half)
                                                          : run(negative_logits_bfloat16);
        result.require_written("logits");
        return counters;
    });
}

extern "C" void negative_backward(
    const Problem* problem, const void* gradient, const void* output, const void* rows, const int64_t* index, const int64_t* tokens,
    const void* weights, const int64_t* starts, void* output_gradient, void* rows_gradient, host::Outcome* outcome
) {
    host::report(outcome, [&] {
        const Problem& p = *problem;
        NegativeTiling tiling = p.tiling();
        std::vector<host::Allocation> inputs;
        inputs.push_back(host::global(gradient, p.pairs() * p.bytes()));
        inputs.push_back(host::global(output, p.tokens * p.width * p.bytes()));
        inputs.push_back(host::global(rows, p.rows * p.width * p.bytes()));
        inputs.push_back(host::global(index, p.pairs() * 8));
        inputs.push_back(host::global(tokens, p.pairs() * 8));
        inputs.push_back(host::global(weights, p.pairs() * p.bytes()));
        inputs.push_back(host::global(starts, (p.rows + 1) * 8));
        inputs.push_back(host::global(&tiling, sizeof tiling));
        const auto of_output = host::unwritten(output_gradient, p.tokens * p.width * p.bytes());
        const auto of_rows = host::unwritten(rows_gradient, p.rows * p.width * p.bytes());
        const host::Workspace workspace(negative_workspace_bytes(tiling, true));
        const auto run = [&](auto kernel) {
            return host::launch(p.cores, [&] {
                kernel(address(gradient), address(output), address(rows), address(index), address(tokens), address(weights),
                       address(starts), address(output_gradient), address(rows_gradient), workspace.data(), address(&tiling));
            }, {p.seed});
        };
        const host::Counters counters = p.dtype == FLOAT  ? run(negative_logits_backward_float)
                                        : p.dtype == HALF ? run(negative_logits_backward_half)
                                                          : run(negative_logits_backward_bfloat16);
        of_output.require_written("the output's gradient");
        of_rows.require_written("the rows' gradient");
        return counters;
    });
}

// numbers: local bytes of forward and backward, pitch, rows at once of both, workspace of backward. -1 where the tiling refuses.
extern "C" int64_t negative_sizes(const Problem* problem, int64_t* numbers) {
    NegativeTiling t;
    const Problem& p = *problem;
    if (negative_tiling(t, {p.tokens, p.samples, p.rows, p.width, p.bytes(), p.cores}) != nullptr) return -1;
    const int64_t found[] = {
        negative_local_bytes(t, p.bytes()), sum_local_bytes(t.sums, p.bytes(), true), t.sums.pitch, t.block_rows, t.sums.tile_rows,
        negative_workspace_bytes(t, true)};
    std::copy(std::begin(found), std::end(found), numbers);
    return 0;
}
