// SPDX-License-Identifier: Apache-2.0
// The few full-size buffers that units share, leased by position in the step.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <utility>
#include <vector>

#include "fsdp/concepts.hpp"
#include "fsdp/error.hpp"
#include "fsdp/memory.hpp"

namespace fsdp {

/// A reusable buffer and what must have happened before its next content is written.
template <class Event>
struct Slot {
  Slot(Event free_event, std::size_t size) : free(std::move(free_event)), bytes(size) {}

  Event free;  ///< the last content has been read by this rank, and zeroed where that is promised (reduce)
  bool free_recorded = false;  ///< false until the slot was first used: nothing to wait for
  Ticket collective{};         ///< the last collective whose peers may still read this slot
  bool leased = false;
  std::byte* data = nullptr;
  std::size_t bytes;
};

/// Slots that units take in turn (position modulo count, so that addresses repeat every step), and slots of units that
/// keep their own. Owns the slots' events; the memory is carved from one allocation by place().
template <Device D>
class BufferPool {
 public:
  using Event = typename D::Event;

  /// Adds a slot of `bytes` that units take in turn.
  void add_shared(D const& device, std::size_t bytes) { shared_.emplace_back(device.make_event(), bytes); }
  /// Adds a slot of one unit's own.
  Slot<Event>& add_own(D const& device, std::size_t bytes) { return own_.emplace_back(device.make_event(), bytes); }

  std::size_t bytes() const {
    std::size_t sum = 0;
    for (auto const& slot : shared_) sum += slot.bytes;
    for (auto const& slot : own_) sum += slot.bytes;
    return sum;
  }
  /// Lays all slots into `memory` of bytes() bytes.
  void place(std::byte* memory) {
    for (auto* slots : {&shared_, &own_}) {
      for (auto& slot : *slots) {
        slot.data = memory;
        memory += slot.bytes;
      }
    }
  }

  /// Positions count from 0 again: a new pass over the units begins.
  void restart() { position_ = 0; }
  /// Takes the slot whose turn it is, or the next one after it that is not leased (prefetch lists may overtake).
  /// @return nullptr while all are leased
  Slot<Event>* take() {
    FSDP_EXPECTS(!shared_.empty(), "a pooled unit without a pool");
    for (std::size_t tried = 0; tried < shared_.size(); ++tried) {
      auto& slot = shared_[position_++ % shared_.size()];
      if (!slot.leased) return &slot;
    }
    return nullptr;
  }

  template <class Visit>
  void for_each(Visit&& visit) {
    for (auto& slot : shared_) visit(slot);
    for (auto& slot : own_) visit(slot);
  }

 private:
  std::deque<Slot<Event>> shared_, own_;  // deque: addresses stay
  std::size_t position_ = 0;
};

/// Slots that were leased and count as in use in an account until they are leased again, or a pass is complete.
template <class Event>
class SlotLeases {
 public:
  /// `slot` is leased for `bytes`. A former lease of it ends.
  void begin(Slot<Event>& slot, std::int64_t bytes, MemoryAccount& account) {
    for (auto const& lease : leases_)
      if (lease.slot == &slot) account.lease(MemoryTag::reduce, -lease.bytes);
    std::erase_if(leases_, [&](Lease const& lease) { return lease.slot == &slot; });
    slot.leased = true;
    leases_.push_back({&slot, bytes});
    account.lease(MemoryTag::reduce, bytes);
  }
  /// Leases of slots that were given back end.
  void end_returned(MemoryAccount& account) {
    for (auto const& lease : leases_)
      if (!lease.slot->leased) account.lease(MemoryTag::reduce, -lease.bytes);
    std::erase_if(leases_, [](Lease const& lease) { return !lease.slot->leased; });
  }

 private:
  struct Lease {
    Slot<Event>* slot;
    std::int64_t bytes;
  };
  std::vector<Lease> leases_;
};

}  // namespace fsdp
