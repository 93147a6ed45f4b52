// SPDX-License-Identifier: Apache-2.0
// Gathers a unit's full parameters on the gather stream, and drops them again.
#pragma once

#include <cstdint>
#include <optional>
#include <type_traits>
#include <utility>

#include "fsdp/concepts.hpp"
#include "fsdp/engine/flat_param.hpp"
#include "fsdp/engine/history.hpp"
#include "fsdp/engine/slots.hpp"
#include "fsdp/kernels/elementwise.hpp"
#include "fsdp/memory.hpp"
#include "fsdp/step/program.hpp"
#include "fsdp/trace/trace.hpp"

namespace fsdp {

/// Owns the gather stream, the gather communicators and the buffers of full parameters.
///
/// [Note: Kept slices] With EngineOptions::reshard_ranks, compute copies a slice of a unit aside when its forward ends,
/// and backward gathers the slices of a few consecutive ranks instead of the shards of all. The next copy needs no wait
/// for peers that still read the slice: it follows the unit's next forward gather, which peers join only after their
/// backward gather, on the same stream.
template <Communicator C, class P>
class Unsharder {
 public:
  using D = typename C::Device;
  using Stream = typename D::Stream;
  using Unit = FlatParam<D, P>;
  using Param = typename P::Param;
  using Master = typename P::Master;

  Unsharder(D const& device, MemoryAccount& account, History const& history)
      : device_(device),
        account_(&account),
        history_(&history),
        stream_(device.make_stream("gather", StreamPriority::high)) {}

  BufferPool<D>& pool() { return pool_; }
  BufferPool<D>& kept_pool() { return kept_pool_; }
  Stream& stream() { return stream_; }
  /// Of the ranks that share units' shards. @pre some unit has several
  C& communicator() { return *comm_; }
  void set_tracer(Tracer<D>* tracer) { trace_.attach(tracer); }
  /// Shards lie over the ranks of `group`.
  void set_shard_group(C group) { comm_.emplace(std::move(group)); }
  /// After forward, slices stay over the ranks of `group`. @param member  this rank's place in it
  void set_kept_group(C group, int member) {
    kept_comm_.emplace(std::move(group));
    kept_member_ = member;
  }
  /// @param slots  what the pools are placed in
  /// @note Collective: yes, over the communicators that want to know.
  [[gnu::cold]] void register_memory(AccountedMemory<C> const& slots) {
    register_with(comm_, slots);
    register_with(kept_comm_, slots);
  }
  /// The shards are placed: where nothing is gathered, parameters are there from now on.
  template <class Units>
  void prepare(Units& units, Program const& program) {
    if constexpr (std::is_same_v<Param, Master>) {
      for (std::size_t u = 0; u < units.size(); ++u) {
        if (!program.units[u].reads_masters) continue;
        units[u]->full = units[u]->master;
        units[u]->state = UnitState::unsharded;
      }
    }
  }

  /// Starts to gather a sharded unit into `slot`.
  /// @note Stream: gather waits until the buffer's last content was read here and by peers, and until the shard was
  /// updated.
  /// @note Collective: one all-gather of shard_numel elements a rank, none where the rank has the unit for itself.
  void unshard(Unit& unit, Slot<D>& slot, std::string_view pass) {
    auto* const own_slice = take(unit, slot) + unit.shard().begin;
    bool const several = unit.placement().shards > 1;
    unit.updated.await_pending(device_, stream_, WaitSite::gather_updated);
    auto span = begin_span(unit, several ? "all-gather" : "cast", pass);
    kernels::cast(device_, stream_, static_cast<Master const*>(unit.master), own_slice, unit.shard_numel());
    if (several)
      slot.collective =
          comm_->all_gather(stream_, static_cast<Param const*>(own_slice), unit.full,
                            static_cast<std::size_t>(unit.shard_numel()), history_->label(unit.name(), pass));
    span.end();
    unit.gathered.signal(device_, stream_);
  }
  /// The same from the slices that keep_slice has kept.
  /// @note Collective: one all-gather among the ranks of the kept group.
  void unshard_slices(Unit& unit, Slot<D>& slot, std::string_view pass) {
    take(unit, slot);
    unit.kept_slot->free.await(device_, stream_, WaitSite::gather_kept_slice);
    auto span = begin_span(unit, "all-gather", pass);
    kept_comm_->all_gather(stream_, static_cast<Param const*>(kept_slice(unit)), unit.full,
                           static_cast<std::size_t>(kept_numel(unit)), history_->label(unit.name(), pass));
    span.end();
    unit.gathered.signal(device_, stream_);
  }

  /// Makes `compute` wait until the parameters that unshard() gathers are there.
  void wait_for_unshard(Unit& unit, Stream& compute) {
    unit.gathered.await(device_, compute, WaitSite::compute_unsharded);
    unit.state = UnitState::unsharded;
  }

  /// Drops the full parameters after what `compute` has enqueued so far.
  void drop(Unit& unit, Stream& compute) {
    auto& slot = *unit.gather_slot;
    unit.state = UnitState::sharded;
    unit.full = nullptr;
    account_->lease(MemoryTag::gather, -full_bytes(unit));
    slot.free.signal(device_, compute);
  }
  /// Copies a slice of the full parameters to its slot. @note Stream: compute.
  void keep_slice(Unit& unit, Slot<D>& slot, Stream& compute) {
    auto span = trace_.begin(compute, StreamKind::compute, unit.name(), "keep slice", "forward", kept_bytes(unit));
    unit.kept_slot = &slot;
    device_.copy_async(compute, kept_slice(unit), unit.full + kept_member_ * kept_numel(unit),
                       static_cast<std::size_t>(kept_bytes(unit)));
    span.end();
    slot.free.signal(device_, compute);
    account_->lease(MemoryTag::gather, kept_bytes(unit));
  }
  void drop_slice(Unit& unit) {
    unit.kept_slot = nullptr;
    account_->lease(MemoryTag::gather, -kept_bytes(unit));
  }

  /// Drops the unit if it is unsharded, and its kept slice: a pass is forgotten.
  /// @note Stream: compute waits for a gather that is under way, for it may go on to write what that one reads.
  void reshard(Unit& unit, Stream& compute) {
    if (has_kept(unit)) drop_slice(unit);
    if (unit.state == UnitState::sharded || unit.gather_slot == nullptr) return;
    unit.gathered.await_pending(device_, compute, WaitSite::compute_unsharded);
    drop(unit, compute);
  }

 private:
  /// The slot's next content is the unit's. @return its first element
  Param* take(Unit& unit, Slot<D>& slot) {
    unit.gather_slot = &slot;
    unit.full = reinterpret_cast<Param*>(slot.data);
    unit.state = UnitState::unsharding;
    account_->lease(MemoryTag::gather, full_bytes(unit));
    slot.free.await_pending(device_, stream_, WaitSite::gather_slot_read);
    if (comm_) comm_->wait_for_peers(stream_, std::exchange(slot.collective, {}), WaitSite::gather_peers_read);
    return unit.full;
  }
  [[nodiscard]] auto begin_span(Unit const& unit, std::string_view what, std::string_view pass) {
    return trace_.begin(stream_, StreamKind::gather, unit.name(), what, pass, full_bytes(unit));
  }
  static bool has_kept(Unit const& unit) { return unit.kept_slot != nullptr; }
  static Param* kept_slice(Unit const& unit) { return reinterpret_cast<Param*>(unit.kept_slot->data); }
  std::int64_t kept_numel(Unit const& unit) const { return unit.full_numel() / kept_comm_->size(); }
  std::int64_t kept_bytes(Unit const& unit) const {
    return kept_numel(unit) * static_cast<std::int64_t>(sizeof(Param));
  }
  static std::int64_t full_bytes(Unit const& unit) {
    return unit.full_numel() * static_cast<std::int64_t>(sizeof(Param));
  }

  D device_;
  std::optional<C> comm_, kept_comm_;
  int kept_member_ = 0;
  MemoryAccount* account_;
  History const* history_;
  TraceHook<D> trace_;
  BufferPool<D> pool_, kept_pool_;
  Stream stream_;  // last: joined before what its work uses is destroyed
};

}  // namespace fsdp
