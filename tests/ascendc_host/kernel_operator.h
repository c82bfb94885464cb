// Stands in for the AscendC header of this name, so that kernels compile unmodified for a CPU. Written from public
// documentation; holds what this project's kernels use. See README.md in this folder.
#pragma once

#include <cstdint>
#include <cstring>
#include <string>

#define __aicore__
#define __global__
#define __gm__
#define __ubuf__
#define GM_ADDR uint8_t*

#include "host/copies.h"
#include "host/core.h"
#include "host/counters.h"
#include "host/global_memory.h"
#include "host/launch.h"
#include "host/local_memory.h"
#include "host/numbers.h"
#include "host/queues.h"
#include "host/selections.h"
#include "host/vector.h"

// How the two kinds of cores are launched; here there is one kind.
#define KERNEL_TASK_TYPE_DEFAULT(type) static_assert(true)

inline uint8_t* GetSysWorkSpacePtr() { return nullptr; }

namespace AscendC {

// The workspace that a kernel gets begins with what the system needs of it; here it needs nothing.
inline GM_ADDR GetUserWorkspace(GM_ADDR workspace) { return workspace; }
inline void SetSysWorkspace(GM_ADDR) {}

}  // namespace AscendC
