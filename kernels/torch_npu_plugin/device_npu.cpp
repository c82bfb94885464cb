#include "device.h"

#include <torch_npu/csrc/core/npu/NPUStream.h>
#include <torch_npu/csrc/framework/OpCommand.h>

#include <utility>

namespace turbogr::npu {

void enqueue(c10::Device device, const std::string& name, std::function<int(void* stream)> task) {
    const auto stream = c10_npu::getCurrentNPUStream(device.index());
    // torch_npu hands work over in a thread of its own; asking there for the stream must not wait for that thread.
    at_npu::native::OpCommand::RunOpApiV2(name, [stream, task = std::move(task)] { return task(stream.stream(false)); });
}

}  // namespace turbogr::npu
