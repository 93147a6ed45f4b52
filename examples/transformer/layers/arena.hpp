// SPDX-License-Identifier: Apache-2.0
// Memory of activations: pieces of two blocks, activations and workspace, that are allocated once.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "fsdp/memory.hpp"

namespace transformer {

/// Hands out pieces of a block of memory, one after another, each on a multiple of 256 bytes. Without memory it only
/// counts, and the pieces are null. A copy hands out the same memory again: its pieces lie over those of the original.
class Arena {
 public:
  explicit Arena(std::byte* base = nullptr) : base_(base) {}

  template <class E>
  E* take(std::int64_t count) {
    auto const begin = used_;
    used_ += (static_cast<std::size_t>(count) * sizeof(E) + 255) / 256 * 256;
    return base_ == nullptr ? nullptr : reinterpret_cast<E*>(base_ + begin);
  }
  /// Bytes up to the end of the last piece.
  std::size_t used() const { return used_; }
  /// Goes on behind the pieces of `other` too, a copy of this arena.
  void join(Arena const& other) { used_ = std::max(used_, other.used_); }

 private:
  std::byte* base_;
  std::size_t used_ = 0;
};

/// The two blocks of a model, entered in the account as reserved and as live.
template <class D>
class ActivationMemory {
 public:
  /// @param lay_out  called as lay_out(kept, work) with two arenas: first without memory, for the sizes, then for the
  /// addresses
  /// @param account  outlives this object
  template <class LayOut>
  ActivationMemory(D const& device, fsdp::MemoryAccount& account, LayOut const& lay_out)
      : device_(device), account_(&account) {
    Arena kept, work;
    lay_out(kept, work);
    activations_ = {device_, account, fsdp::MemoryTag::activations, kept.used()};
    workspace_ = {device_, account, fsdp::MemoryTag::workspace, work.used()};
    lease(1);
    kept = Arena(activations_.data()), work = Arena(workspace_.data());
    lay_out(kept, work);
  }
  ActivationMemory(ActivationMemory const&) = delete;
  ActivationMemory& operator=(ActivationMemory const&) = delete;
  ~ActivationMemory() { lease(-1); }

 private:
  void lease(std::int64_t sign) {
    account_->add_live(fsdp::MemoryTag::activations, sign * static_cast<std::int64_t>(activations_.bytes()));
    account_->add_live(fsdp::MemoryTag::workspace, sign * static_cast<std::int64_t>(workspace_.bytes()));
  }

  D device_;
  fsdp::MemoryAccount* account_;
  fsdp::AccountedMemory<D const> activations_, workspace_;
};

}  // namespace transformer
