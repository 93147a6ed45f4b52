// SPDX-License-Identifier: Apache-2.0
// Which of a device's collectives run at the same time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <list>
#include <memory>
#include <mutex>

namespace standin::nccl {

/// The version that the stand-in reports: FSDP_STANDIN_NCCL_VERSION (22605 for 2.26.5), or that of its nccl.h.
int version();

/// [Note: Collectives hold a device]
/// A collective's kernel waits for its peers while it holds multiprocessors (Guide, Using multiple NCCL communicators
/// concurrently). Whether another one fits beside it depends on the GPU, on what else runs there, and on NCCL's
/// choices. A program may count on nothing but this: where all ranks enqueue their collectives in one order, over all
/// communicators, each in turn can run. FSDP_STANDIN_NCCL chooses between two devices that are worse than most:
///
///   serial (the default)  one collective at a time, in the order in which the host enqueued them. Ranks with one order
///                         never hang; ranks with two orders always do.
///   seeded                a collective whose stream has come to it starts when FSDP_STANDIN_SEED says so, at most
///                         FSDP_STANDIN_NCCL_CAPACITY at once (unset: any number). How many were under way at once is
///                         said at the end: so many must fit for this order not to hang.
///
/// From version 2.26 on, with NCCL_LAUNCH_ORDER_IMPLICIT=1, a seeded device starts collectives in the order in which
/// the host enqueued them, as NCCL does. Both are read when the device's first communicator is made.
class Occupancy {
 public:
  /// The occupancy of a device; made by the first call, as the environment says.
  static Occupancy& of(int device);

  /// A collective's place, taken when it is enqueued, and left when this is destroyed.
  class Place {
   public:
    /// @param rank  in the communicator: orders are drawn for each anew, also where processes have one device each
    Place(Occupancy& device, void const* communicator, int rank);
    Place(Place const&) = delete;
    Place& operator=(Place const&) = delete;
    ~Place() { leave(); }
    /// Whether the collective, which its stream has come to, runs. To be called until it does.
    bool enter();
    void leave();

   private:
    friend class Occupancy;
    Occupancy& device_;
    void const* communicator_;
    std::uint64_t draw_;  // order among those that could start
    int declines_;        // calls of enter() that come too early
    bool ready_ = false;  // its stream has come to it
    bool running_ = false;
    bool here_ = true;
    std::list<Place*>::iterator entry_;
  };

  /// Removes all of a communicator that was aborted.
  void remove(void const* communicator);
  /// The most collectives that were under way at once.
  int needed();

 private:
  explicit Occupancy(int device);
  bool starts(Place const& place) const;
  void leave(Place& place);

  bool seeded_ = false;
  bool host_order_ = false;
  std::uint64_t seed_ = 0;
  int capacity_ = std::numeric_limits<int>::max();
  std::mutex mutex_;
  std::list<Place*> places_;  // in the order in which they were enqueued
  std::uint64_t enqueued_ = 0;
  int running_ = 0;
  int needed_ = 0;
};

}  // namespace standin::nccl
