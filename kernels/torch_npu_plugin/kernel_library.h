// The kernels' library, made by CANN's compiler, which stands beside the plugin's own.
#pragma once

#include <cstdint>
#include <string>

namespace turbogr::npu {

// `arguments` are addresses in global memory, in the order of the kernel's parameters.
using Entry = uint32_t (*)(uint32_t blocks, void* stream, void* const* arguments);

// turbogr_launch_<kernel>. Throws if the library is not there, cannot be loaded or has no such kernel.
Entry entry(const std::string& kernel);

// What CANN tells of the machine's NPUs: cores, and bytes of a workspace that are CANN's own.
struct Platform {
    int64_t cube_cores, vector_cores, workspace;
};

const Platform& platform();

}  // namespace turbogr::npu
