// Offsets on the host, where tilings are made.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <vector>

namespace turbogr::npu {

// The values of int64 offsets that lie on a device. Copying waits for the device; a batch's offsets are the same tensor in every
// layer, forward and backward, so that this happens once a batch.
std::shared_ptr<const std::vector<int64_t>> on_host(const at::Tensor& offsets);

}  // namespace turbogr::npu
