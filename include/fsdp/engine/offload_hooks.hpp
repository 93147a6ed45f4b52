// SPDX-License-Identifier: Apache-2.0
// Interface between an engine, its optimizers and state in host memory. fsdp/offload.hpp implements it.
// fsdp/offload.hpp has the rest.
#pragma once

#include <cstddef>
#include <cstdint>

#include "fsdp/fixed_array.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE::detail {

struct SlotMemory;

/// Moments of an optimizer in host memory: see [Note: Offloading]. The moments of a unit lie end to end.
struct HostMoments {
  std::byte* home(std::size_t unit) const { return host + starts[unit]; }
  std::int64_t bytes(std::size_t unit) const { return starts[unit + 1] - starts[unit]; }

  FixedArray<std::int64_t> starts;  ///< by unit: offset of its moments in bytes; one more for the end
  FixedArray<std::byte*> staged;    ///< by unit: address of its moments during its update
  std::byte* host = nullptr;
  bool steps = false;  ///< the optimizer takes the step under way
};

class OffloadHooks {
 public:
  OffloadHooks() = default;
  OffloadHooks(OffloadHooks&&) = delete;
  virtual ~OffloadHooks() = default;

  /// Takes memory, and tells units and slots where their state lies. @pre the engine is being sealed
  virtual void place(SlotMemory& memory) = 0;
  /// Gives the memory of place() back: sealing has failed.
  virtual void release() noexcept = 0;
  /// Called when master shards have been initialised.
  virtual void initialized() = 0;
  /// Takes zeroed memory for an optimizer's moments, until free_moments().
  /// @param starts      see HostMoments
  /// @param slot_bytes  of each of two staging slots in device memory, which begin at `slots`
  virtual HostMoments* make_moments(FixedArray<std::int64_t> starts, std::byte* slots, std::int64_t slot_bytes) = 0;
  virtual void free_moments(HostMoments* moments) = 0;
  virtual void begin_step() = 0;
  /// Called before and after a unit's masters are written on compute.
  /// @param updates  by an optimizer's step
  /// @param whole    false: an exception has ended that
  virtual void begin_write(std::size_t unit, bool updates) = 0;
  virtual void end_write(std::size_t unit, bool updates, bool whole) = 0;
  /// Compute waits until a unit's masters are in host memory.
  virtual void order_read(std::size_t unit) = 0;
  /// Blocks the calling thread until all state is in host memory.
  virtual void await_stores() = 0;
};

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE::detail
