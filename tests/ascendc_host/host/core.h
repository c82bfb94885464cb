// A simulated core: what belongs to one thread of a launch. Errors name the core and the line of the kernel.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <source_location>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "counters.h"

namespace host {

struct Error : std::runtime_error {
    using std::runtime_error::runtime_error;
};

// Thrown in cores that wait for one that failed: its error is the one to report.
struct Abandoned {};

enum class Position { VECIN, VECOUT, VECCALC, OTHER };

inline constexpr int64_t LOCAL_BYTES = 192 * 1024;
inline constexpr int64_t BLOCK_BYTES = 32;
inline constexpr int EVENTS_PER_KIND = 8;
inline constexpr int EVENT_KINDS = 32;

// A piece of local memory that TPipe gave to a queue or a TBuf.
struct Buffer {
    enum class State { Free, Allocated, Enqueued, Dequeued, Released };

    int64_t begin, bytes;
    Position position;
    bool of_queue;
    State state;
    // Since it was allocated: by a copy from global memory; by the vector or the scalar unit.
    bool copied = false, calculated = false;
    // What was done when it was enqueued, and when it was freed, by pipe.
    std::array<int64_t, 4> enqueued{}, freed{};
};

// One address per type: libstdc++ has no typeid of _Float16.
template <class T>
inline char TYPE_TAG = 0;

// Bytes of global memory that a core touched since the last SyncAll.
struct Access {
    enum class Kind { Read, Write, Atomic };

    uintptr_t begin, end;
    Kind kind;
    const char* operation;
    uint32_t line;
};

// Bytes of global memory that a product still reads or writes.
struct Pending {
    uintptr_t begin, end;
    bool result;
    int64_t product;
};

class Cache;
class Pipes;
class Schedule;

// Who touches memory. Element: the vector unit, at an address that needs not be aligned to a block.
enum class Unit { Scalar, Vector, Element, CopyIn, CopyOut, Cube };

struct Core {
    int64_t index = 0, count = 1;
    Schedule* schedule = nullptr;
    Cache* cache = nullptr;
    Pipes* pipes = nullptr;  // null where a launch does not follow them
    Counters counters;

    // Local memory, and which of its bytes hold something.
    std::vector<uint8_t> memory = std::vector<uint8_t>(LOCAL_BYTES), written = std::vector<uint8_t>(LOCAL_BYTES);
    int64_t used = 0;
    std::deque<Buffer> buffers;  // addresses stay valid
    int64_t allocated[4] = {};   // tensors of queues in use, by position

    std::vector<Access> accesses;

    // Products that were not waited for. The cube works them off in order: who waits for one has waited for those before it.
    std::vector<Pending> pending;
    int64_t products = 0;

    const void* atomic = nullptr;  // TYPE_TAG of the type of SetAtomicAdd
    bool flags[EVENT_KINDS][EVENTS_PER_KIND] = {};
    bool reserved[EVENT_KINDS][EVENTS_PER_KIND] = {};

    const char* operation = "the kernel";
    std::source_location place;
    std::string complaint;  // of a destructor, which cannot throw
};

inline thread_local Core* current = nullptr;

inline Core& core() {
    if (current == nullptr) throw Error("AscendC was called outside of host::launch");
    return *current;
}

template <class... Parts>
[[noreturn]] void fail(const Parts&... parts) {
    std::ostringstream text;
    if (current != nullptr) {
        const std::string file = current->place.file_name();
        text << "core " << current->index << ", " << current->operation;
        if (current->place.line() != 0) text << " (" << file.substr(file.rfind('/') + 1) << ":" << current->place.line() << ")";
        text << ": ";
    }
    (text << ... << parts);
    throw Error(text.str());
}

template <class... Parts>
inline void require(bool condition, const Parts&... parts) {
    if (!condition) [[unlikely]]
        fail(parts...);
}

using Place = std::source_location;

// Every function of the API begins with this: what is being done, and where in the kernel.
inline Core& enter(const char* operation, const Place& place) {
    Core& c = core();
    c.operation = operation;
    c.place = place;
    return c;
}

}  // namespace host

// The last parameter of functions of the API: the line that calls.
#define HOST_PLACE const host::Place& place = host::Place::current()
