#include "kernel_library.h"

#include <c10/util/Exception.h>
#include <dlfcn.h>

#include <filesystem>

namespace turbogr::npu {

namespace {

constexpr auto MEND = "; on a machine with CANN, `make npu-kernels` builds them (docs/npu.md)";

std::string path() {
    Dl_info own{};
    TORCH_CHECK(dladdr(reinterpret_cast<void*>(&entry), &own) != 0 && own.dli_fname, "turbogr: the plugin cannot find itself");
    return std::filesystem::path(own.dli_fname).replace_filename("libturbogr_ascendc.so").string();
}

void* symbol(const std::string& name) {
    static void* library = [] {
        // Local: no other library's symbols are meant to meet these.
        void* handle = dlopen(path().c_str(), RTLD_NOW | RTLD_LOCAL);
        const char* told = handle ? nullptr : dlerror();
        TORCH_CHECK(handle, "turbogr: the kernels for NPUs cannot be loaded: ", told ? told : path(), MEND);
        return handle;
    }();
    void* found = dlsym(library, name.c_str());
    TORCH_CHECK(found, "turbogr: ", path(), " has no ", name, ": it was built from other sources than the plugin", MEND);
    return found;
}

}  // namespace

Entry entry(const std::string& kernel) { return reinterpret_cast<Entry>(symbol("turbogr_launch_" + kernel)); }

const Platform& platform() {
    static const Platform found = [] {
        int64_t numbers[3] = {};
        const auto ask = reinterpret_cast<uint32_t (*)(int64_t*)>(symbol("turbogr_platform"));
        const auto code = ask(numbers);
        TORCH_CHECK(code == 0 && numbers[0] > 0 && numbers[1] > 0, "turbogr: CANN does not tell the NPU's cores (code ", code, ")");
        return Platform{numbers[0], numbers[1], numbers[2]};
    }();
    return found;
}

}  // namespace turbogr::npu
