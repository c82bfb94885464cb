// Calls the backward kernel of jagged_fuxi_attention. See build.py.

#include "kernel_operator.h"

#include "host/driver.h"

#include "fuxi_problem.h"
#include "kernels.h"

TURBOGR_KERNEL(jagged_fuxi_attention_backward, 17);

extern "C" void fuxi_attention_backward(
    const driver::Problem* problem, void* gradient, void* grad_q, void* grad_k, void* grad_v, float* grad_position,
    float* grad_time, host::Outcome* outcome
) {
    host::report(outcome, [&] {
        const driver::Problem& p = *problem;
        const driver::Inputs in(p, true);
        const int64_t rows = p.tokens * p.heads * p.bytes();
        const auto given = host::global(gradient, rows * 3 * p.v_width);
        const auto q = host::unwritten(grad_q, rows * p.qk_width), k = host::unwritten(grad_k, rows * p.qk_width),
                   v = host::unwritten(grad_v, rows * p.v_width),
                   position = host::unwritten(grad_position, p.position_count * 4),
                   time = host::unwritten(grad_time, p.time_parameter_bytes());
        const auto call = [&](auto kernel) {
            kernel(driver::address(gradient), driver::address(p.q), driver::address(p.k), driver::address(p.v),
                   in.plan.address(), driver::address(p.position_bias), driver::address(p.time_parameters),
                   driver::address(p.query_times), driver::address(p.key_times), in.edges.address(), driver::address(grad_q),
                   driver::address(grad_k), driver::address(grad_v), driver::address(grad_position),
                   driver::address(grad_time), in.workspace.data(), in.tiling_bytes.address());
        };
        const auto counters = driver::launch(
            p, call, jagged_fuxi_attention_backward_float, jagged_fuxi_attention_backward_half,
            jagged_fuxi_attention_backward_bfloat16);
        q.require_written("grad_q");
        k.require_written("grad_k");
        v.require_written("grad_v");
        position.require_written("grad_position");
        time.require_written("grad_time");
        return counters;
    });
}
