// SPDX-License-Identifier: Apache-2.0
// The full-size buffers that a program names by number.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "fsdp/concepts.hpp"
#include "fsdp/engine/fence.hpp"

namespace fsdp {

/// A reusable buffer and what must have happened before its next content is written.
template <Device D>
struct Slot {
  Slot(D const& device, std::size_t size) : free(device), bytes(size) {}

  Fence<D> free;        ///< the last content has been read by this rank, and zeroed where that is promised (reduce)
  Ticket collective{};  ///< the last collective whose peers may still read this slot
  // Of gradients:
  bool zeroed = false;       ///< some unit that leases it counts on zeroes
  std::int64_t counted = 0;  ///< bytes that count as in use until the next lease, or the end of a pass
  std::byte* data = nullptr;
  std::size_t bytes;
};

/// Owns the slots' events; the memory is carved from one allocation by place().
template <Device D>
class BufferPool {
 public:
  /// As many buffers as there will be: their addresses stay.
  void reserve(std::size_t count) { slots_.reserve(count); }
  void add(D const& device, std::size_t bytes) { slots_.emplace_back(device, bytes); }
  Slot<D>& operator[](std::size_t index) { return slots_[index]; }

  std::size_t bytes() const {
    std::size_t sum = 0;
    for (auto const& slot : slots_) sum += slot.bytes;
    return sum;
  }
  /// Lays all slots into `memory` of bytes() bytes.
  void place(std::byte* memory) {
    for (auto& slot : slots_) {
      slot.data = memory;
      memory += slot.bytes;
    }
  }

  auto begin() { return slots_.begin(); }
  auto end() { return slots_.end(); }

 private:
  std::vector<Slot<D>> slots_;
};

}  // namespace fsdp
