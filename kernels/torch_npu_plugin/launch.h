// One call of a kernel: its arguments in the order of its parameters, then `run`.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>
#include <type_traits>
#include <vector>

namespace turbogr::npu {

class Launch {
public:
    // operator_name without "turbogr::"; `like` tells device and dtype: float32, float16 or bfloat16.
    Launch(const std::string& operator_name, const at::Tensor& like);

    // A tensor, made contiguous where it is not; null where it is absent.
    Launch& tensor(const at::Tensor& x);
    Launch& tensor(const std::optional<at::Tensor>& x);

    // Numbers that the host has, as a null-free address in global memory.
    template <class T>
    Launch& numbers(const std::vector<T>& values) {
        static_assert(std::is_trivially_copyable_v<T>);
        return bytes(values.data(), values.size() * sizeof(T));
    }

    // Tensors that the kernel finds by addresses among the numbers.
    Launch& keep(const std::vector<at::Tensor>& tensors) {
        kept_ = tensors;
        return *this;
    }

    // Workspace and tiling, and the launch on the device's current stream. `workspace` counts bytes of the kernel's own part.
    template <class Tiling>
    void run(const Tiling& tiling, int64_t workspace, int64_t blocks) {
        static_assert(std::is_trivially_copyable_v<Tiling>);
        run(&tiling, sizeof(Tiling), workspace, blocks);
    }

private:
    struct Argument {
        at::Tensor tensor;  // undefined: of the host's numbers, if `offset` is one
        int64_t offset;
    };

    Launch& bytes(const void* data, size_t count);
    void run(const void* tiling, size_t count, int64_t workspace, int64_t blocks);

    std::string kernel_;
    c10::Device device_;
    std::vector<Argument> arguments_;
    std::vector<at::Tensor> kept_;
    std::vector<uint8_t> host_;
};

// Whether kernels exist for a dtype.
bool has_kernels(at::ScalarType dtype);

}  // namespace turbogr::npu
