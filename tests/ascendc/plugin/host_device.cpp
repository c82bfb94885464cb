// Stands in for torch_npu: PyTorch's PrivateUse1 with the host's memory, where kernels run as soon as they are handed over.
//
// Enough of a device for the plugin and for PyTorch's implementations of the operators: memory, copies, views; everything else
// is done by the CPU. Beside the kernels' library of the stand-in for AscendC it runs the whole plugin but device_npu.cpp.
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>

#include "../../../kernels/torch_npu_plugin/device.h"

namespace {

constexpr auto DEVICE = c10::DeviceType::PrivateUse1;
int64_t to_device = 0, to_host = 0;

std::mutex mutex;
std::map<uintptr_t, size_t> allocated;  // begin -> bytes

void give_back(void* data) {
    const std::lock_guard lock(mutex);
    allocated.erase(reinterpret_cast<uintptr_t>(data));
    std::free(data);
}

struct Memory final : c10::Allocator {
    // Every byte is set, so that what nobody writes is not a number.
    c10::DataPtr allocate(size_t bytes) override {
        const size_t room = (bytes / 512 + 1) * 512;
        void* const data = std::aligned_alloc(512, room);
        std::memset(data, 0xFF, room);
        const std::lock_guard lock(mutex);
        allocated[reinterpret_cast<uintptr_t>(data)] = bytes;
        return {data, data, &give_back, c10::Device(DEVICE, 0)};
    }
    c10::DeleterFnPtr raw_deleter() const override { return &give_back; }
    void copy_data(void* to, const void* from, std::size_t bytes) const override { default_copy_data(to, from, bytes); }
};

struct Hooks final : at::PrivateUse1HooksInterface {
    bool isBuilt() const override { return true; }
    bool isAvailable() const override { return true; }
    bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
    at::Allocator* getPinnedMemoryAllocator() const override { return c10::GetCPUAllocator(); }
    bool isPinnedPtr(const void*) const override { return true; }
};

c10::Stream stream() { return c10::Stream(c10::Stream::DEFAULT, {DEVICE, 0}); }

struct Guard final : c10::impl::NoOpDeviceGuardImpl<DEVICE> {
    c10::Device exchangeDevice(c10::Device) const override { return {DEVICE, 0}; }
    c10::Device getDevice() const override { return {DEVICE, 0}; }
    c10::Stream getStream(c10::Device) const noexcept override { return stream(); }
    c10::Stream getDefaultStream(c10::Device) const override { return stream(); }
    c10::Stream exchangeStream(c10::Stream) const noexcept override { return stream(); }
};

Memory memory;
Hooks hooks;
const bool registered = [] {
    c10::SetAllocator(DEVICE, &memory);
    at::RegisterPrivateUse1HooksInterface(&hooks);
    return true;
}();
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>) {
    const at::OptionalDeviceGuard guard;
    constexpr c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
    return at::detail::empty_strided_generic(size, stride, &memory, keys, dtype.value_or(at::kFloat));
}

at::Tensor empty(c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<at::Device>, std::optional<bool>, std::optional<at::MemoryFormat> format) {
    constexpr c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
    return at::detail::empty_generic(size, &memory, keys, dtype.value_or(at::kFloat), format);
}

// The same memory, as a CPU's.
at::Tensor seen_by_cpu(const at::Tensor& x) {
    if (x.device().is_cpu()) return x;
    return at::from_blob(x.data_ptr(), x.sizes(), x.strides(), x.options().device(at::kCPU).requires_grad(false));
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool) {
    to_device += from.device().is_cpu() && !to.device().is_cpu();
    to_host += !from.device().is_cpu() && to.device().is_cpu();
    seen_by_cpu(to).copy_(seen_by_cpu(from));
    return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
    to.resize_(from.sizes());
    return copy_from(from, to, false);
}

const at::Tensor& resize(const at::Tensor& x, c10::SymIntArrayRef size, std::optional<at::MemoryFormat>) {
    auto* const impl = x.unsafeGetTensorImpl();
    const auto sizes = C10_AS_INTARRAYREF_SLOW(size);
    if (x.sizes() == sizes) return x;  // whatever its strides
    int64_t count = 1;
    for (const auto n : sizes) count *= n;
    const auto bytes = static_cast<size_t>((count + x.storage_offset()) * x.element_size());
    auto* const storage = x.storage().unsafeGetStorageImpl();
    if (bytes > storage->nbytes()) {
        auto grown = memory.allocate(bytes);
        if (storage->nbytes()) std::memcpy(grown.get(), storage->data(), storage->nbytes());
        storage->set_data_ptr_noswap(std::move(grown));
        storage->set_nbytes(bytes);
    }
    impl->set_sizes_contiguous(sizes);
    return x;
}

void on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) { at::native::cpu_fallback(op, stack); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
    m.impl("empty.memory_format", TORCH_FN(empty));
    m.impl("empty_strided", TORCH_FN(empty_strided));
    m.impl("_copy_from", TORCH_FN(copy_from));
    m.impl("_copy_from_and_resize", TORCH_FN(copy_from_and_resize));
    m.impl("resize_", TORCH_FN(resize));
    m.impl("view", TORCH_FN(at::native::view));
    m.impl("as_strided", TORCH_FN(at::native::as_strided_tensorimpl));
    m.impl("_reshape_alias", TORCH_FN(at::native::_reshape_alias));
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&on_cpu>()); }

}  // namespace

namespace turbogr::npu {

void enqueue(c10::Device, const std::string& name, std::function<int(void* stream)> task) {
    const int code = task(nullptr);
    TORCH_CHECK(code == 0, name, " gave ", code);
}

}  // namespace turbogr::npu

// Tells the memory of all tensors on the device.
extern "C" void turbogr_test_memory(void (*tell)(void* to, void* begin, int64_t bytes), void* to) {
    const std::lock_guard lock(mutex);
    for (const auto& [begin, bytes] : allocated) tell(to, reinterpret_cast<void*>(begin), static_cast<int64_t>(bytes));
}

// Copies to the device and to the host so far.
extern "C" void turbogr_test_copies(int64_t* counts) { counts[0] = to_device, counts[1] = to_host; }
