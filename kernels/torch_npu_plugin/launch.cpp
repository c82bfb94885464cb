#include "launch.h"

#include <ATen/ops/empty.h>

#include <atomic>
#include <cstring>
#include <utility>

#include "../ascendc/common/align.h"
#include "device.h"
#include "kernel_library.h"

namespace turbogr::npu {

namespace {

constexpr int64_t NOT_OF_THE_HOST = -1;
std::atomic<int64_t> launches{0};

const char* suffix(at::ScalarType dtype) {
    switch (dtype) {
        case at::kFloat: return "_float";
        case at::kHalf: return "_half";
        case at::kBFloat16: return "_bfloat16";
        default: TORCH_CHECK(false, "turbogr: no kernel for NPUs computes ", dtype);
    }
}

}  // namespace

bool has_kernels(at::ScalarType dtype) { return dtype == at::kFloat || dtype == at::kHalf || dtype == at::kBFloat16; }

Launch::Launch(const std::string& operator_name, const at::Tensor& like)
    : kernel_(operator_name + suffix(like.scalar_type())), device_(like.device()) {}

Launch& Launch::tensor(const at::Tensor& x) {
    TORCH_CHECK(x.device() == device_, "turbogr: ", kernel_, ": a tensor is on ", x.device(), ", another one on ", device_);
    arguments_.push_back({x.contiguous(), NOT_OF_THE_HOST});
    return *this;
}

Launch& Launch::tensor(const std::optional<at::Tensor>& x) {
    if (x.has_value()) return tensor(*x);
    arguments_.push_back({{}, NOT_OF_THE_HOST});
    return *this;
}

Launch& Launch::bytes(const void* data, size_t count) {
    arguments_.push_back({{}, static_cast<int64_t>(host_.size())});
    // Room for at least one number, so that no address is another part's.
    const auto size = static_cast<size_t>(ascend::round_up(static_cast<int64_t>(count) + 1, ascend::GLOBAL_BYTES));
    host_.resize(host_.size() + size);
    if (count) std::memcpy(host_.data() + host_.size() - size, data, count);
    return *this;
}

void Launch::run(const void* tiling, size_t count, int64_t workspace, int64_t blocks) {
    bytes(tiling, count);
    const auto size = static_cast<int64_t>(host_.size());
    // Pinned: from other memory the copy would wait for the device.
    auto pinned = at::empty({size}, at::TensorOptions(at::kByte).pinned_memory(true));
    std::memcpy(pinned.mutable_data_ptr(), host_.data(), host_.size());
    const auto numbers = pinned.to(device_, /*non_blocking=*/true);
    const auto space = at::empty({platform().workspace + workspace}, at::TensorOptions(at::kByte).device(device_));
    const auto tiled = std::move(arguments_.back());
    arguments_.back() = {space, NOT_OF_THE_HOST};
    arguments_.push_back(tiled);

    const auto launch = entry(kernel_);
    launches++;
    // The tensors live until the launch is on the stream; after that the allocator keeps their memory for what is on the stream.
    enqueue(device_, kernel_, [launch, blocks, numbers, arguments = std::move(arguments_), kept = std::move(kept_)](void* stream) {
        std::vector<void*> addresses;
        for (const auto& x : arguments) {
            void* const address = x.tensor.defined() ? x.tensor.data_ptr() : nullptr;
            addresses.push_back(x.offset == NOT_OF_THE_HOST ? address : static_cast<uint8_t*>(numbers.data_ptr()) + x.offset);
        }
        return static_cast<int>(launch(static_cast<uint32_t>(blocks), stream, addresses.data()));
    });
}

}  // namespace turbogr::npu

// Kernels handed over so far, for checks that a call was computed by one.
extern "C" __attribute__((visibility("default"))) int64_t turbogr_launches() { return turbogr::npu::launches; }
