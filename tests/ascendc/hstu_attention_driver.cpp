// Calls the forward kernel of jagged_hstu_attention. See build.py.

#include "kernel_operator.h"

#include "host/driver.h"

#include "hstu_problem.h"
#include "kernels.h"

TURBOGR_KERNEL(jagged_hstu_attention, 12);

extern "C" void hstu_attention(const driver::Problem* problem, void* out, host::Outcome* outcome) {
    host::report(outcome, [&] {
        const driver::Problem& p = *problem;
        const driver::Inputs in(p, false);
        const auto output = host::unwritten(out, p.tokens * p.heads * p.v_width * p.bytes());
        const host::Workspace workspace(turbogr::ascend::hstu_workspace_bytes(in.tiling, p.bytes(), false));
        const auto run = [&](auto kernel) {
            return host::launch(p.cores, [&] {
                kernel(driver::address(p.q), driver::address(p.k), driver::address(p.v), in.plan.address(),
                       driver::address(p.position_bias), driver::address(p.time_bias), driver::address(p.query_times),
                       driver::address(p.key_times), in.edges.address(), driver::address(out), workspace.data(),
                       in.tiling_bytes.address());
            }, {p.seed});
        };
        const host::Counters counters = p.dtype == driver::FLOAT  ? run(jagged_hstu_attention_float)
                                        : p.dtype == driver::HALF ? run(jagged_hstu_attention_half)
                                                                  : run(jagged_hstu_attention_bfloat16);
        output.require_written("out");
        return counters;
    });
}
