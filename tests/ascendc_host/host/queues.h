// TPipe, TQue, TBuf and the flags between pipes.
#pragma once

#include <cstdint>
#include <deque>

#include "core.h"
#include "local_memory.h"

namespace AscendC {

enum class TPosition : uint8_t { GM, A1, A2, B1, B2, C1, C2, CO1, CO2, VECIN, VECOUT, VECCALC, TSCM };
using QuePosition = TPosition;
using TEventID = int8_t;

enum class HardEvent : uint8_t {
    MTE2_V,
    V_MTE2,
    MTE3_V,
    V_MTE3,
    MTE3_MTE2,
    MTE2_MTE3,
    S_V,
    V_S,
    S_MTE2,
    MTE2_S,
    S_MTE3,
    MTE3_S,
    V_V
};  // the pipe that sets, the pipe that waits

enum pipe_t { PIPE_S, PIPE_V, PIPE_M, PIPE_MTE1, PIPE_MTE2, PIPE_MTE3, PIPE_ALL, PIPE_FIX };

inline constexpr TEventID EVENT_ID0 = 0, EVENT_ID1 = 1, EVENT_ID2 = 2, EVENT_ID3 = 3, EVENT_ID4 = 4, EVENT_ID5 = 5,
                          EVENT_ID6 = 6, EVENT_ID7 = 7;

}  // namespace AscendC

using AscendC::pipe_t;
using enum AscendC::pipe_t;

namespace host {

inline constexpr int64_t QUEUE_BUFFERS_AT_ONCE = 8;  // tensors in use, of all queues of one position
inline constexpr int64_t PIPE_BUFFERS = 64;          // of all queues and TBufs of one TPipe

constexpr Position position_of(AscendC::TPosition position) {
    switch (position) {
        case AscendC::TPosition::VECIN: return Position::VECIN;
        case AscendC::TPosition::VECOUT: return Position::VECOUT;
        case AscendC::TPosition::VECCALC: return Position::VECCALC;
        default: return Position::OTHER;
    }
}

// The pipes of an event: the one that sets its flag, the one that waits.
struct Ends {
    Pipe from, to;
};
constexpr Ends ends_of(AscendC::HardEvent kind) {
    using enum AscendC::HardEvent;
    switch (kind) {
        case MTE2_V: return {Pipe::MTE2, Pipe::V};
        case V_MTE2: return {Pipe::V, Pipe::MTE2};
        case MTE3_V: return {Pipe::MTE3, Pipe::V};
        case V_MTE3: return {Pipe::V, Pipe::MTE3};
        case MTE3_MTE2: return {Pipe::MTE3, Pipe::MTE2};
        case MTE2_MTE3: return {Pipe::MTE2, Pipe::MTE3};
        case S_V: return {Pipe::S, Pipe::V};
        case V_S: return {Pipe::V, Pipe::S};
        case S_MTE2: return {Pipe::S, Pipe::MTE2};
        case MTE2_S: return {Pipe::MTE2, Pipe::S};
        case S_MTE3: return {Pipe::S, Pipe::MTE3};
        case MTE3_S: return {Pipe::MTE3, Pipe::S};
        default: return {Pipe::V, Pipe::V};
    }
}

inline bool& flag(bool (&table)[EVENT_KINDS][EVENTS_PER_KIND], AscendC::HardEvent kind, int event) {
    require(event >= 0 && event < EVENTS_PER_KIND, "event ", event, " does not exist: there are ", EVENTS_PER_KIND,
            " of a kind");
    return table[static_cast<int>(kind)][event];
}

// The first event of the kind that nobody reserved.
inline AscendC::TEventID free_event(Core& c, AscendC::HardEvent kind) {
    for (int event = 0; event < EVENTS_PER_KIND; event++) {
        if (!flag(c.reserved, kind, event)) return static_cast<AscendC::TEventID>(event);
    }
    fail("all events of the kind are reserved");
}

}  // namespace host

namespace AscendC {

template <HardEvent kind>
void SetFlag(int32_t event, HOST_PLACE) {
    host::Core& c = host::enter("SetFlag", place);
    bool& set = host::flag(c.flags, kind, event);
    host::require(!set, "event ", event, " is set already");
    set = true;
    c.counters.events++;
    if (c.pipes != nullptr) c.pipes->set(static_cast<int>(kind), event, host::ends_of(kind).from);
}

template <HardEvent kind>
void WaitFlag(int32_t event, HOST_PLACE) {
    host::Core& c = host::enter("WaitFlag", place);
    bool& set = host::flag(c.flags, kind, event);
    host::require(set, "waits for event ", event, ", which nobody set");
    set = false;
    if (c.pipes != nullptr) c.pipes->wait(static_cast<int>(kind), event, host::ends_of(kind).to);
}

template <pipe_t pipe>
void PipeBarrier(HOST_PLACE) {
    host::Core& c = host::enter("PipeBarrier", place);
    if (c.pipes == nullptr) return;
    if constexpr (pipe == PIPE_ALL) c.pipes->join_all();
    if constexpr (pipe == PIPE_MTE2) c.pipes->barrier(host::Pipe::MTE2);
    if constexpr (pipe == PIPE_MTE3) c.pipes->barrier(host::Pipe::MTE3);
}

// `depth` is how many tensors may be in the queue at once.
template <TPosition source, TPosition destination, int32_t depth, auto mask = 0>
class TQueBind {
    static_assert(depth >= 1, "queues of depth 0 are not simulated");
    static constexpr host::Pipe FILLS =
        source == TPosition::GM || source == TPosition::VECIN ? host::Pipe::MTE2 : host::Pipe::V;
    static constexpr host::Pipe USES =
        source == TPosition::VECOUT || destination == TPosition::VECOUT ? host::Pipe::MTE3 : host::Pipe::V;
    static constexpr TPosition POSITION = source == TPosition::GM ? destination : source;
    static_assert(host::position_of(POSITION) != host::Position::OTHER, "only the vector unit's queues are simulated");

  public:
    template <class T>
    LocalTensor<T> AllocTensor(HOST_PLACE) {
        host::Core& c = host::enter("AllocTensor", place);
        int64_t& in_use = c.allocated[static_cast<int>(host::position_of(POSITION))];
        host::require(in_use < host::QUEUE_BUFFERS_AT_ONCE, "more than ", host::QUEUE_BUFFERS_AT_ONCE,
                      " tensors of queues of one position at once");
        for (host::Buffer* buffer : buffers_) {
            if (buffer->state != host::Buffer::State::Free) continue;
            buffer->state = host::Buffer::State::Allocated;
            buffer->copied = buffer->calculated = false;
            in_use++;
            if (c.pipes != nullptr) c.pipes->join(FILLS, buffer->freed);
            LocalTensor<T> tensor(buffer, buffer->begin, buffer->bytes);
            tensor.spoil(0, buffer->bytes);
            return tensor;
        }
        host::fail(buffers_.empty() ? "the queue was not given to InitBuffer" : "no buffer of the queue is free");
    }
    template <class T>
    void AllocTensor(LocalTensor<T>& tensor, HOST_PLACE) {
        tensor = AllocTensor<T>(place);
    }
    template <class T>
    bool EnQue(const LocalTensor<T>& tensor, HOST_PLACE) {
        host::Core& c = host::enter("EnQue", place);
        host::Buffer& buffer = own(tensor);
        host::require(buffer.state == host::Buffer::State::Allocated, "a tensor that is not allocated, or was enqueued before");
        host::require(static_cast<int32_t>(queued_.size()) < depth, "the queue of depth ", depth, " is full");
        buffer.state = host::Buffer::State::Enqueued;
        if (c.pipes != nullptr) buffer.enqueued = c.pipes->snapshot(FILLS);
        queued_.push_back(&buffer);
        return true;
    }
    template <class T>
    LocalTensor<T> DeQue(HOST_PLACE) {
        host::Core& c = host::enter("DeQue", place);
        host::require(!queued_.empty(), "the queue is empty");
        host::Buffer* buffer = queued_.front();
        queued_.pop_front();
        buffer->state = host::Buffer::State::Dequeued;
        if (c.pipes != nullptr) c.pipes->join(USES, buffer->enqueued);
        return LocalTensor<T>(buffer, buffer->begin, buffer->bytes);
    }
    template <class T>
    void DeQue(LocalTensor<T>& tensor, HOST_PLACE) {
        tensor = DeQue<T>(place);
    }
    template <class T>
    void FreeTensor(const LocalTensor<T>& tensor, HOST_PLACE) {
        host::Core& c = host::enter("FreeTensor", place);
        host::Buffer& buffer = own(tensor);
        host::require(buffer.state != host::Buffer::State::Free, "a tensor that was freed before");
        host::require(buffer.state != host::Buffer::State::Enqueued, "a tensor that is in the queue");
        buffer.state = host::Buffer::State::Free;
        if (c.pipes != nullptr) buffer.freed = c.pipes->snapshot(USES);
        c.allocated[static_cast<int>(host::position_of(POSITION))]--;
    }
    bool VacantInQue() const { return static_cast<int32_t>(queued_.size()) < depth; }
    bool HasTensorInQue() const { return !queued_.empty(); }
    int32_t GetTensorCountInQue() const { return static_cast<int32_t>(queued_.size()); }

  private:
    friend class TPipe;

    template <class T>
    host::Buffer& own(const LocalTensor<T>& tensor) const {
        const auto found = std::find(buffers_.begin(), buffers_.end(), tensor.buffer());
        host::require(found != buffers_.end(), "a tensor that is not the queue's");
        return **found;
    }

    std::deque<host::Buffer*> buffers_, queued_;
};

template <TPosition position, int32_t depth, auto mask = 0>
using TQue = std::conditional_t<position == TPosition::VECOUT, TQueBind<position, TPosition::GM, depth, mask>,
                                TQueBind<TPosition::GM, position, depth, mask>>;

// Local memory without a queue: whoever shares it between pipes sets flags.
template <TPosition position = TPosition::VECCALC>
class TBuf {
  public:
    template <class T>
    LocalTensor<T> Get(HOST_PLACE) const {
        host::enter("TBuf::Get", place);
        host::require(buffer_ != nullptr, "the TBuf was not given to InitBuffer");
        return LocalTensor<T>(buffer_, buffer_->begin, buffer_->bytes);
    }
    template <class T>
    LocalTensor<T> Get(uint32_t count, HOST_PLACE) const {
        return GetWithOffset<T>(count, 0, place);
    }
    template <class T>
    LocalTensor<T> GetWithOffset(uint32_t count, uint32_t offset_bytes, HOST_PLACE) const {
        LocalTensor<T> all = Get<T>(place);
        const int64_t bytes = int64_t{count} * static_cast<int64_t>(sizeof(T));
        host::require(offset_bytes + bytes <= buffer_->bytes, "a tensor that is longer than the TBuf of ", buffer_->bytes,
                      " bytes");
        return LocalTensor<T>(buffer_, all.begin() + offset_bytes, bytes);
    }

  private:
    friend class TPipe;
    host::Buffer* buffer_ = nullptr;
};

// Hands out local memory, from its beginning, until it is destroyed or reset.
class TPipe {
  public:
    TPipe() : core_(host::core()), first_(core_.buffers.size()), used_before_(core_.used) {
        // The next one begins where this one ends, and gives everything back in reverse order.
    }
    TPipe(const TPipe&) = delete;
    ~TPipe() { Destroy(); }

    void Init() {}
    void Destroy() {
        for (size_t i = first_; i < core_.buffers.size(); i++) {
            host::Buffer& buffer = core_.buffers[i];
            const bool kept =
                buffer.of_queue && buffer.state != host::Buffer::State::Free && buffer.state != host::Buffer::State::Released;
            if (kept && core_.complaint.empty()) {
                core_.complaint = "core " + std::to_string(core_.index) + ", the end of a TPipe: a tensor of " +
                                  std::to_string(buffer.bytes) + " bytes was not freed";
            }
            buffer.state = host::Buffer::State::Released;
        }
        if (core_.pipes != nullptr) core_.pipes->join_all();
        first_ = core_.buffers.size();
        core_.used = used_before_;
        count_ = 0;
    }
    void Reset() { Destroy(); }

    template <TPosition source, TPosition destination, int32_t depth, auto mask>
    bool InitBuffer(TQueBind<source, destination, depth, mask>& queue, uint8_t count, uint32_t bytes, HOST_PLACE) {
        host::enter("InitBuffer", place);
        host::require(queue.buffers_.empty() || queue.buffers_.front()->state == host::Buffer::State::Released,
                      "the queue has buffers already");
        queue.buffers_.clear();
        queue.queued_.clear();
        for (int i = 0; i < count; i++) {
            queue.buffers_.push_back(
                take(bytes, host::position_of(TQueBind<source, destination, depth, mask>::POSITION), true));
        }
        return true;
    }
    template <TPosition position>
    bool InitBuffer(TBuf<position>& buffer, uint32_t bytes, HOST_PLACE) {
        host::enter("InitBuffer", place);
        buffer.buffer_ = take(bytes, host::position_of(position), false);
        return true;
    }

    // FetchEventID names a free event without reserving it.
    TEventID FetchEventID(HardEvent kind, HOST_PLACE) { return host::free_event(host::enter("FetchEventID", place), kind); }
    template <HardEvent kind>
    TEventID FetchEventID(HOST_PLACE) {
        return FetchEventID(kind, place);
    }
    template <HardEvent kind>
    TEventID AllocEventID(HOST_PLACE) {
        host::Core& c = host::enter("AllocEventID", place);
        const TEventID event = host::free_event(c, kind);
        host::flag(c.reserved, kind, event) = true;
        return event;
    }
    template <HardEvent kind>
    void ReleaseEventID(TEventID event, HOST_PLACE) {
        host::Core& c = host::enter("ReleaseEventID", place);
        bool& reserved = host::flag(c.reserved, kind, event);
        host::require(reserved, "event ", static_cast<int>(event), " was not reserved");
        reserved = false;
    }

  private:
    host::Buffer* take(int64_t asked, host::Position position, bool of_queue) {
        const int64_t bytes = host::rounded_up(asked, host::BLOCK_BYTES);
        host::require(asked > 0, "a buffer without bytes");
        host::require(++count_ <= host::PIPE_BUFFERS, "more than ", host::PIPE_BUFFERS, " buffers in one TPipe");
        host::require(core_.used + bytes <= host::LOCAL_BYTES, "local memory of ", host::LOCAL_BYTES,
                      " bytes is full: ", core_.used, " are taken and ", bytes, " more are asked for");
        core_.buffers.push_back(
            {core_.used, bytes, position, of_queue, of_queue ? host::Buffer::State::Free : host::Buffer::State::Allocated});
        host::Buffer* buffer = &core_.buffers.back();
        core_.used += bytes;
        core_.counters.peak_local_bytes = std::max(core_.counters.peak_local_bytes, core_.used);
        LocalTensor<uint8_t>(buffer, buffer->begin, bytes).spoil(0, bytes);
        return buffer;
    }

    host::Core& core_;
    size_t first_;
    int64_t used_before_, count_ = 0;
};

}  // namespace AscendC
