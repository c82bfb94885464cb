// A small NPU, for the plugin: 3 cube cores with 2 vector cores each, and no workspace that is the system's.
#include <cstdint>

extern "C" uint32_t turbogr_platform(int64_t* numbers) {
    numbers[0] = 3, numbers[1] = 6, numbers[2] = 0;
    return 0;
}
