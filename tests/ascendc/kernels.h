// The kernels' entries, for drivers. The kernels themselves are compiled once for all (compile.py).
#pragma once

#include <cstddef>
#include <utility>

#include "kernel_operator.h"

namespace driver {

template <size_t>
using Argument = GM_ADDR;
template <class>
struct Of;
template <size_t... I>
struct Of<std::index_sequence<I...>> {
    using Kernel = void(Argument<I>...);
};
template <size_t COUNT>
using Kernel = typename Of<std::make_index_sequence<COUNT>>::Kernel;

}  // namespace driver

#define TURBOGR_KERNEL(name, count) \
    extern "C" driver::Kernel<count> name##_float, name##_half, name##_bfloat16
