// Kernel side: moving rows between global and local memory, and the order between a core's units.
#pragma once

#include "kernel_operator.h"

#include "align.h"

namespace turbogr::ascend {

template <typename T>
constexpr int64_t COPY_ELEMENTS = COPY_BYTES / static_cast<int64_t>(sizeof(T));

// What follows on the second unit waits for what the first one was told before.
template <AscendC::HardEvent EVENT>
__aicore__ inline void fence(AscendC::TPipe* pipe) {
    const auto event = pipe->FetchEventID(EVENT);
    AscendC::SetFlag<EVENT>(event);
    AscendC::WaitFlag<EVENT>(event);
}

// Rows of a matrix in global memory, `from_stride` elements apart, to local rows `to_stride` apart, with zeros up to the next 32
// bytes.
template <typename T>
__aicore__ inline void load_rows(
    const AscendC::LocalTensor<T>& to, int64_t to_stride, const AscendC::GlobalTensor<T>& from, int64_t from_stride, int64_t rows,
    int64_t columns
) {
    const int64_t padded = round_up(columns, COPY_ELEMENTS<T>), bytes = static_cast<int64_t>(sizeof(T));
    const AscendC::DataCopyExtParams shape{
        static_cast<uint16_t>(rows), static_cast<uint32_t>(columns * bytes),
        static_cast<uint32_t>(rows == 1 ? 0 : (from_stride - columns) * bytes),
        static_cast<uint32_t>((to_stride - padded) / COPY_ELEMENTS<T>), 0};
    const AscendC::DataCopyPadExtParams<T> padding{true, 0, static_cast<uint8_t>(padded - columns), static_cast<T>(0)};
    AscendC::DataCopyPad(to, from, shape, padding);
}

// The other way.
template <typename T>
__aicore__ inline void store_rows(
    const AscendC::GlobalTensor<T>& to, int64_t to_stride, const AscendC::LocalTensor<T>& from, int64_t from_stride, int64_t rows,
    int64_t columns
) {
    const int64_t padded = round_up(columns, COPY_ELEMENTS<T>), bytes = static_cast<int64_t>(sizeof(T));
    const AscendC::DataCopyExtParams shape{
        static_cast<uint16_t>(rows), static_cast<uint32_t>(columns * bytes),
        static_cast<uint32_t>((from_stride - padded) / COPY_ELEMENTS<T>),
        static_cast<uint32_t>(rows == 1 ? 0 : (to_stride - columns) * bytes), 0};
    AscendC::DataCopyPad(to, from, shape);
}

// Zeros in the columns of local rows that load_rows left out.
__aicore__ inline void clear_behind(const AscendC::LocalTensor<float>& rows_of, int64_t stride, int64_t rows, int64_t columns) {
    const int64_t padded = round_up(columns, COPY_ELEMENTS<float>);
    if (padded == stride) return;
    for (int64_t r = 0; r < rows; r++) {
        AscendC::Duplicate(rows_of[r * stride + padded], 0.0f, static_cast<int32_t>(stride - padded));
    }
}

// A struct that the host wrote to global memory.
template <typename T>
__aicore__ inline void read_struct(T& to, GM_ADDR from) {
    static_assert(sizeof(T) % sizeof(int32_t) == 0);
    const auto* words = reinterpret_cast<__gm__ int32_t*>(from);
    auto* copy = reinterpret_cast<int32_t*>(&to);
    for (uint32_t i = 0; i < sizeof(T) / sizeof(int32_t); i++) copy[i] = words[i];
}

}  // namespace turbogr::ascend
