// Calls both kernels of jagged_embedding_lookup, and what their tiling tells. See build.py.

#include "kernel_operator.h"

#include "host/driver.h"

#include <vector>

#include "common/even_parts.h"
#include "common/sum_parts.h"
#include "jagged_embedding_lookup/op_host/jagged_embedding_lookup_tiling.h"
#include "kernels.h"

TURBOGR_KERNEL(jagged_embedding_lookup, 5);
TURBOGR_KERNEL(jagged_embedding_lookup_backward, 6);

namespace {

using namespace turbogr::ascend;

constexpr int64_t FLOAT = 0, HALF = 1;

// As tests/ascendc/lookup.py fills it.
struct Problem {
    int64_t dtype, tables, ids, rows, width, cores, seed;
    LookupTable* list;

    int64_t bytes() const { return dtype == FLOAT ? 4 : 2; }
    LookupTiling tiling() const {
        LookupTiling t;
        const char* error = lookup_tiling(t, {tables, ids, rows, width, bytes(), cores});
        if (error != nullptr) throw std::invalid_argument(error);
        return t;
    }
    host::Allocation registered_list() const { return host::global(list, tables * static_cast<int64_t>(sizeof(LookupTable))); }
};

GM_ADDR address(const void* pointer) { return static_cast<GM_ADDR>(const_cast<void*>(pointer)); }

}  // namespace

extern "C" void lookup_forward(const Problem* problem, const int64_t* ids, void* out, host::Outcome* outcome) {
    host::report(outcome, [&] {
        const Problem& p = *problem;
        LookupTiling tiling = p.tiling();
        std::vector<host::Allocation> inputs;
        inputs.push_back(p.registered_list());
        inputs.push_back(host::global(ids, p.ids * 8));
        inputs.push_back(host::global(&tiling, sizeof tiling));
        for (int64_t k = 0; k < p.tables; k++) {
            inputs.push_back(host::global(reinterpret_cast<void*>(p.list[k].address), p.list[k].rows * p.width * p.bytes()));
        }
        const auto output = host::unwritten(out, p.ids * p.width * p.bytes());
        const host::Workspace workspace(lookup_workspace_bytes(tiling, false));
        const auto run = [&](auto kernel) {
            return host::launch(p.cores, [&] {
                kernel(address(p.list), address(ids), address(out), workspace.data(), address(&tiling));
            }, {p.seed});
        };
        const host::Counters counters = p.dtype == FLOAT  ? run(jagged_embedding_lookup_float)
                                        : p.dtype == HALF ? run(jagged_embedding_lookup_half)
                                                          : run(jagged_embedding_lookup_bfloat16);
        output.require_written("out");
        return counters;
    });
}

extern "C" void lookup_backward(
    const Problem* problem, const void* gradient, const int64_t* order, const int64_t* starts, host::Outcome* outcome
) {
    host::report(outcome, [&] {
        const Problem& p = *problem;
        LookupTiling tiling = p.tiling();
        std::vector<host::Allocation> inputs, outputs;
        inputs.push_back(p.registered_list());
        inputs.push_back(host::global(gradient, p.ids * p.width * p.bytes()));
        inputs.push_back(host::global(order, p.ids * 8));
        inputs.push_back(host::global(starts, (p.rows + 1) * 8));
        inputs.push_back(host::global(&tiling, sizeof tiling));
        for (int64_t k = 0; k < p.tables; k++) {
            outputs.push_back(host::unwritten(reinterpret_cast<void*>(p.list[k].address), p.list[k].rows * p.width * p.bytes()));
        }
        const host::Workspace workspace(lookup_workspace_bytes(tiling, true));
        const auto run = [&](auto kernel) {
            return host::launch(p.cores, [&] {
                kernel(address(gradient), address(order), address(starts), address(p.list), workspace.data(), address(&tiling));
            }, {p.seed});
        };
        const host::Counters counters = p.dtype == FLOAT  ? run(jagged_embedding_lookup_backward_float)
                                        : p.dtype == HALF ? run(jagged_embedding_lookup_backward_half)
                                                          : run(jagged_embedding_lookup_backward_bfloat16);
        for (const auto& output : outputs) output.require_written("a table's gradient");
        return counters;
    });
}

// numbers: local bytes of forward and backward, pitch, rows at once of both, workspace of backward. -1 where the tiling refuses.
extern "C" int64_t lookup_sizes(const Problem* problem, int64_t* numbers) {
    LookupTiling t;
    const Problem& p = *problem;
    if (lookup_tiling(t, {p.tables, p.ids, p.rows, p.width, p.bytes(), p.cores}) != nullptr) return -1;
    const int64_t found[] = {
        lookup_local_bytes(t, p.bytes()), sum_local_bytes(t.sums, p.bytes(), false), t.sums.pitch, t.block_rows, t.sums.tile_rows,
        lookup_workspace_bytes(t, true)};
    std::copy(std::begin(found), std::end(found), numbers);
    return 0;
}

// parts [cores, 2] of [begin, end).
extern "C" void even_parts(int64_t begin, int64_t end, int64_t cores, int64_t* parts) {
    for (int64_t c = 0; c < cores; c++) {
        const Part part = even_part(begin, end, cores, c);
        parts[2 * c] = part.begin;
        parts[2 * c + 1] = part.end;
    }
}

namespace {

struct Listed {
    const int64_t* starts;
    int64_t at(int64_t row) const { return starts[row]; }
    void near(int64_t, int64_t) const {}
};

}  // namespace

// parts [cores, 8]: empty, first row, last row, first and last position, resumes, stops, the first core of the first row.
extern "C" void sum_parts(const int64_t* starts, int64_t rows, int64_t cores, int64_t* parts) {
    Listed listed{starts};
    for (int64_t c = 0; c < cores; c++) {
        const SumPart p = sum_part(listed, rows, cores, c);
        const int64_t first = p.empty || !p.resumes ? c : first_core_of(p, cores, c);
        const int64_t found[] = {p.empty, p.first_row, p.last_row, p.first, p.last, p.resumes, p.stops, first};
        std::copy(std::begin(found), std::end(found), parts + 8 * c);
    }
}
