// SPDX-License-Identifier: Apache-2.0
// Copies token ids to the device.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "fsdp/concepts.hpp"
#include "fsdp/memory.hpp"

namespace transformer {

/// Copies token ids to the device behind the caller's back: a call returns once the ids are out of the caller's memory.
///
/// Two staging buffers and two device buffers take turns on a stream of their own, so that a batch is on its way while
/// the last one is computed with. A call waits until the copies of the batch before the last are done, and so for the
/// device only when the host is more than three batches ahead: an engine's passes_ahead does not let it come to that.
template <class D>
class TokenFeed {
 public:
  struct Batch {
    std::int32_t const *tokens, *targets;  // device memory
  };

  TokenFeed(D const& device, fsdp::MemoryAccount& account, std::int64_t capacity)
      : device_(device),
        stream_(device.make_stream("tokens", fsdp::StreamPriority::high)),
        capacity_(capacity),
        slots_{make_slot(account), make_slot(account)} {}
  TokenFeed(TokenFeed const&) = delete;
  ~TokenFeed() {
    try {
      device_.synchronize(stream_);  // staging must outlive the copies
    } catch (...) {                  // the stream's error has been reported to whoever used it
    }
  }

  /// @param targets  null where there are none
  /// @note Stream: `compute` waits until the ids are there.
  Batch upload(typename D::Stream& compute, std::int32_t const* tokens, std::int32_t const* targets,
               std::int64_t count) {
    auto& slot = slots_[next_];
    if (slot.used) {
      device_.synchronize(slot.there);  // its last copy has left the staging buffer
      device_.wait(stream_, slot.read, fsdp::WaitSite::none);
    }
    slot.used = true;
    auto* const ids = slot.memory.template as<std::int32_t>();
    std::memcpy(slot.staging.data(), tokens, bytes(count));
    device_.copy_async(stream_, ids, slot.staging.data(), bytes(count));
    if (targets != nullptr) {
      auto* const staging = slot.staging.data() + capacity_;
      std::memcpy(staging, targets, bytes(count));
      device_.copy_async(stream_, ids + capacity_, staging, bytes(count));
    }
    device_.record(slot.there, stream_);
    device_.wait(compute, slot.there, fsdp::WaitSite::none);
    return {ids, ids + capacity_};
  }

  /// `compute` has enqueued everything that reads the last batch.
  void release(typename D::Stream& compute) {
    device_.record(slots_[next_].read, compute);
    next_ = (next_ + 1) % slots_.size();
  }

 private:
  static std::size_t bytes(std::int64_t count) { return static_cast<std::size_t>(count) * sizeof(std::int32_t); }

  struct Slot {
    fsdp::PinnedArray<D, std::int32_t> staging;
    fsdp::AccountedMemory<D const> memory;
    typename D::Event there, read;
    bool used = false;
  };
  Slot make_slot(fsdp::MemoryAccount& account) const {
    return {{device_, 2 * static_cast<std::size_t>(capacity_)},
            {device_, account, fsdp::MemoryTag::workspace, 2 * bytes(capacity_)},
            device_.make_event(),
            device_.make_event(),
            false};
  }

  D device_;
  typename D::Stream stream_;
  std::int64_t capacity_;
  std::array<Slot, 2> slots_;
  std::size_t next_ = 0;
};

}  // namespace transformer
