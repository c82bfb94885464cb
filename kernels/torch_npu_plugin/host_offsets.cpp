#include "host_offsets.h"

#include <c10/util/intrusive_ptr.h>

#include <deque>
#include <mutex>
#include <optional>

namespace turbogr::npu {

namespace {

using Values = std::shared_ptr<const std::vector<int64_t>>;

struct Known {
    c10::weak_intrusive_ptr<c10::StorageImpl> storage;  // weak: memory that is given back is told from what takes its place
    int64_t first, count;
    uint32_t version;
    Values values;
};

// Batches whose layers may run by turns: training, and validation in between.
constexpr size_t BATCHES = 4;

Values read(const at::Tensor& offsets) {
    const auto copied = offsets.to(at::kCPU, at::kLong).contiguous();
    const auto* data = copied.const_data_ptr<int64_t>();
    return std::make_shared<const std::vector<int64_t>>(data, data + copied.numel());
}

}  // namespace

Values on_host(const at::Tensor& offsets) {
    // Tensors of inference mode count no versions: a change could not be seen.
    if (offsets.is_inference() || !offsets.is_contiguous()) return read(offsets);
    static std::mutex mutex;
    static std::deque<Known> known;
    const auto* storage = offsets.storage().unsafeGetStorageImpl();
    const auto version = static_cast<uint32_t>(offsets._version());
    const auto same = [&](const Known& x) {
        return x.storage._unsafe_get_target() == storage && !x.storage.expired() && x.version == version &&
               x.first == offsets.storage_offset() && x.count == offsets.numel();
    };
    const std::lock_guard lock(mutex);
    for (const auto& x : known)
        if (same(x)) return x.values;
    known.push_front(
        {offsets.storage().getWeakStorageImpl(), offsets.storage_offset(), offsets.numel(), version, read(offsets)});
    if (known.size() > BATCHES) known.pop_back();
    return known.front().values;
}

}  // namespace turbogr::npu
