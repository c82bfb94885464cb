// Calls the forward kernel of jagged_fuxi_attention. See build.py.

#include "kernel_operator.h"

#include "host/driver.h"

#include "jagged_fuxi_attention/op_kernel/jagged_fuxi_attention.cpp"

#include "fuxi_problem.h"

extern "C" void fuxi_attention(const driver::Problem* problem, void* out, host::Outcome* outcome) {
    host::report(outcome, [&] {
        const driver::Problem& p = *problem;
        const driver::Inputs in(p, false);
        const auto output = host::unwritten(out, p.tokens * p.heads * 3 * p.v_width * p.bytes());
        const auto call = [&](auto kernel) {
            kernel(in.q, in.k, in.v, in.plan, in.tables.position_bias, in.tables.time_parameters, in.tables.query_times,
                   in.tables.key_times, in.tables.edges, driver::address(out), in.workspace.data(), in.tiling_bytes);
        };
        const auto counters = driver::launch(
            p, call, jagged_fuxi_attention_float, jagged_fuxi_attention_half, jagged_fuxi_attention_bfloat16);
        output.require_written("out");
        return counters;
    });
}
