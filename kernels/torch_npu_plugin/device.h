// What the operators ask of the device. device_npu.cpp answers with torch_npu; it alone includes torch_npu's headers, and CANN's
// that come with these. Tests answer in its place with a device whose memory is the host's.
#pragma once

#include <c10/core/Device.h>

#include <functional>
#include <string>

namespace turbogr::npu {

// Puts `task` where the work of the device's current stream is handed over, behind what is there; the task gets the stream and
// returns 0 or an error code. Tensors that it needs are kept alive by what it holds.
void enqueue(c10::Device device, const std::string& name, std::function<int(void* stream)> task);

}  // namespace turbogr::npu
