// SPDX-License-Identifier: Apache-2.0
// A copy of a rank's slices in host memory, which a thread writes while training continues.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <type_traits>
#include <vector>

#include "fsdp/checkpoint/manifest.hpp"
#include "fsdp/memory.hpp"
#include "fsdp/staging.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE::checkpoint {

/// Host memory for a copy, entered in the engine's account as MemoryTag::snapshot. It stays allocated for later copies.
template <class E>
class HostCopy {
 public:
  explicit HostCopy(E& engine) : engine_(&engine) {}
  HostCopy(HostCopy&&) = delete;
  ~HostCopy() { account(-reserved_); }

  /// Makes room for `bytes`; its content is lost if the memory has to grow. @throws what the device's allocation
  /// throws; then it has no memory
  void reserve(std::int64_t bytes) {
    if (memory_ && bytes <= reserved_) return;
    account(-reserved_);
    memory_.reset();
    reserved_ = 0;
    memory_ = std::make_unique<Memory>(engine_->device(), static_cast<std::size_t>(bytes));
    reserved_ = bytes;
    account(bytes);
  }
  /// @pre reserve()
  std::byte* data() const { return memory_->data(); }

 private:
  using Memory = Staging<std::remove_cvref_t<typename E::Device>, std::byte>;

  void account(std::int64_t bytes) { engine_->account().reserve(MemoryTag::snapshot, bytes); }

  E* engine_;
  std::unique_ptr<Memory> memory_;
  std::int64_t reserved_ = 0;
};

/// Blocks of slices that lie end to end from `bytes` on, as write_rank_file asks for them. @param slices  outlive it
inline auto blocks_of(std::vector<Slice> const& slices, std::byte const* bytes) {
  return [&slices, bytes, current = std::size_t{0}, begun = std::int64_t{0}](std::size_t slice, std::int64_t begin,
                                                                             std::int64_t count) mutable {
    for (; current < slice; ++current) begun += slices[current].bytes();
    return std::span<std::byte const>(bytes + begun + begin, static_cast<std::size_t>(count));
  };
}

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE::checkpoint
