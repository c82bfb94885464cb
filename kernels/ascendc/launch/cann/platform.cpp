// What CANN tells of the machine's NPUs, for the plugin, which knows nothing of CANN.
#include <cstdint>

#include "tiling/platform/platform_ascendc.h"

// Cube cores, vector cores, bytes of a workspace that are CANN's own; 0, or 1 if CANN does not know.
extern "C" __attribute__((visibility("default"))) uint32_t turbogr_platform(int64_t* numbers) {
    auto* const platform = platform_ascendc::PlatformAscendCManager::GetInstance();
    if (platform == nullptr) return 1;
    numbers[0] = platform->GetCoreNumAic();
    numbers[1] = platform->GetCoreNumAiv();
    numbers[2] = platform->GetLibApiWorkSpaceSize();
    return 0;
}
