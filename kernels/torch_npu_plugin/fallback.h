// PyTorch's implementation of an operator, for calls that no kernel computes.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <utility>

namespace turbogr::npu {

// The operator's implementation in Python serves every device that has none of its own, the CPU among them: its slot is asked.
template <class Signature, class... Arguments>
auto in_pytorch(const char* name, Arguments&&... arguments) {
    const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(name, "").template typed<Signature>();
    return op.redispatch(c10::DispatchKeySet(c10::DispatchKey::CPU), std::forward<Arguments>(arguments)...);
}

}  // namespace turbogr::npu
