// Calls the forward kernel of jagged_fuxi_attention. See build.py.

#include "kernel_operator.h"

#include "host/driver.h"

#include "fuxi_problem.h"
#include "kernels.h"

TURBOGR_KERNEL(jagged_fuxi_attention, 12);

extern "C" void fuxi_attention(const driver::Problem* problem, void* out, host::Outcome* outcome) {
    host::report(outcome, [&] {
        const driver::Problem& p = *problem;
        const driver::Inputs in(p, false);
        const auto output = host::unwritten(out, p.tokens * p.heads * 3 * p.v_width * p.bytes());
        const auto call = [&](auto kernel) {
            kernel(driver::address(p.q), driver::address(p.k), driver::address(p.v), in.plan.address(),
                   driver::address(p.position_bias), driver::address(p.time_parameters), driver::address(p.query_times),
                   driver::address(p.key_times), in.edges.address(), driver::address(out), in.workspace.data(),
                   in.tiling_bytes.address());
        };
        const auto counters = driver::launch(
            p, call, jagged_fuxi_attention_float, jagged_fuxi_attention_half, jagged_fuxi_attention_bfloat16);
        output.require_written("out");
        return counters;
    });
}
