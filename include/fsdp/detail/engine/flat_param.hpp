// SPDX-License-Identifier: Apache-2.0
// A unit: its tensors as one flat parameter, and the shard that this rank keeps.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "fsdp/detail/engine/callbacks.hpp"
#include "fsdp/layout.hpp"
#include "fsdp/strategy.hpp"
#include "fsdp/tensor.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE {

/// The place of a module's tensor: the number of its unit among the module's (see FlatParam::beside), and its index in
/// that unit's layout. One number, because a vector of a type of its own takes longer to compile.
using TensorId = std::size_t;
using TensorPlace [[deprecated("write TensorId")]] = TensorId;
constexpr TensorId tensor_id(std::size_t unit, std::size_t tensor) { return unit << 48 | tensor; }
constexpr std::size_t unit_number(TensorId id) { return id >> 48; }
constexpr std::size_t tensor_index(TensorId id) { return id & ((std::size_t{1} << 48) - 1); }

namespace detail {
/// Calls `act(T*)` with an address of elements of `type`, which is that of First, Second or float.
template <class First, class Second = First, class Act>
decltype(auto) with_type([[maybe_unused]] DType type, void* data, Act const& act) {
  if constexpr (!std::is_same_v<First, float>)
    if (type == dtype_of<First>) return act(static_cast<First*>(data));
  if constexpr (!std::is_same_v<Second, float> && !std::is_same_v<Second, First>)
    if (type == dtype_of<Second>) return act(static_cast<Second*>(data));
  return act(static_cast<float*>(data));
}
}  // namespace detail

/// Buffers that a use of a unit may access, or copies of them.
struct UseBuffers {
  void const* parameters = nullptr;  ///< (full_numel), of types().parameter
  void* gradients = nullptr;  ///< (full_numel), of types().gradient; nullptr in forward, and where none are written
};

/// A unit's flat parameter: layout, shard, and the buffers that it has while unsharded. Its element types are those of
/// the policy, or fp32; a frozen unit keeps its shard in the type that forward reads.
/// @tparam P  the precision policy
template <class P>
class FlatParam {
 public:
  using Param = typename P::Param;
  using Master = typename P::Master;
  using Reduce = typename P::Reduce;

  /// @param index  among the engine's units
  [[gnu::cold]] FlatParam(std::size_t index, std::string unit_name, ShardingStrategy const& strategy)
      : first(index), index_(index), name_(std::move(unit_name)), strategy_(strategy) {}

  FlatParam(FlatParam const&) = delete;
  [[gnu::cold, gnu::noinline]] ~FlatParam() = default;

  std::size_t index() const { return index_; }
  std::string const& name() const { return name_; }
  ShardingStrategy const& strategy() const { return strategy_; }
  /// This rank's place among the ranks of this unit. @pre sealed
  Placement const& placement() const { return placement_; }
  FlatLayout& layout() { return layout_; }
  FlatLayout const& layout() const { return layout_; }

  /// Pads the layout for `where.world` ranks and fixes this rank's slice.
  /// @param where  of the engine's units that shard
  [[gnu::cold]] void seal(Placement const& where) {
    placement_ = strategy_.shards ? where : where.replicated();
    types_ = declared_types();
    auto const division = layout_.seal(where.world, placement_.shards);
    shard_ = shard_range(layout_.padded(), placement_.shards, placement_.shard);
    auto const begin = std::min(placement_.replica * division.slice, division.shard);
    slice_ = {begin, std::min(begin + division.slice, division.shard)};
    padding_ = layout_.padding();
    begun_ = std::vector<std::size_t>(layout_.tensors().size());
  }

  /// Sealing has failed: the buffers that it has placed are gone.
  [[gnu::cold]] void forget_buffers() noexcept {
    shard_data = gathered = full = full_gradient = scratch_gradient = nullptr;
    master = nullptr;
    gradient = partial = accumulator = nullptr;
  }

  /// @pre sealed
  ElementTypes const& types() const { return types_; }
  /// The type of `gathered`.
  DType gathered_type() const { return offloads_masters ? types_.parameter : types_.master; }
  ElementTypes declared_types() const {
    if (fp32) return {};
    return {dtype_of<Param>, dtype_of<Reduce>, frozen ? dtype_of<Param> : dtype_of<Master>};
  }
  /// Calls `act(T*)` with the shard of parameters in its own type.
  template <class Act>
  decltype(auto) with_shard(Act const& act) const {
    return detail::with_type<Master, Param>(types_.master, shard_data, act);
  }

  /// Calls `act(T*)` with the shard of a unit that trains, for optimizers: T is the policy's type of masters, or float.
  template <class Act>
  decltype(auto) with_master(Act const& act) const {
    return detail::with_type<Master>(types_.master, shard_data, act);
  }

  /// parts of the full parameters that no tensor covers
  std::vector<Range> const& padding() const { return padding_; }

  /// Backward gets a gradient buffer without sums: zeroed, or undefined for modules that begin the sums themselves.
  void start_gradient_buffer() { ++gradients_; }
  /// The gradient of tensor `index` is about to be written. @return whether that write begins its sum
  bool begin_write(std::size_t index) {
    return sets_gradients && std::exchange(begun_[index], gradients_) != gradients_;
  }
  [[deprecated("write begin_write")]] bool begin_gradient(std::size_t index) { return begin_write(index); }

  /// The parts of tensors that this rank will keep, if no more tensors are added: `layout().segments(shard())` of a
  /// sealed unit. @param where  of the engine's units that shard
  [[gnu::cold]] std::vector<Segment> shard_segments(Placement const& where) const {
    auto const place = strategy_.shards ? where : where.replicated();
    return layout_.segments(shard_range(layout_.divided(place.world, place.shards).padded, place.shards, place.shard));
  }
  Range shard() const { return shard_; }  ///< this rank's slice, in elements of the flat parameter
  /// The slice that this rank sums for norms and saves, in elements of the shard: of replicas, each has another one,
  /// and the last ones may have none. See Division.
  Range slice() const { return slice_; }
  std::int64_t full_numel() const { return layout_.padded(); }  ///< elements of the full parameters, padding included
  std::int64_t shard_numel() const { return shard_.size(); }
  /// Whether the unit has no parameters (a ReLU, a dropout): nothing is gathered, reduced or updated for it. @pre
  /// sealed
  bool empty() const { return full_numel() == 0; }
  /// Whether the unit has gradients and optimizers update it. @pre sealed
  bool trains() const { return !empty() && !frozen; }

  /// (shard_numel) parameters that the unit keeps, of types().master. If they are offloaded: in host memory; while
  /// Shards::Write lives, in a staging slot.
  void* shard_data = nullptr;
  void* gathered = nullptr;  ///< (shard_numel) what gathers read, of gathered_type(); mostly the same
  /// shard_data, if it has the policy's type of masters; else nullptr: see with_shard.
  Master* master = nullptr;
  /// (shard_numel) gradient shard, already averaged over the world. It may lie in host memory, as shard_data.
  float* gradient = nullptr;
  void* full = nullptr;  ///< (full_numel) full parameters, of types().parameter; nullptr while sharded
  void* full_gradient =
      nullptr;  ///< (full_numel) gradients that backward writes, of types().gradient; valid in its uses
  /// Buffer for gradients that are not wanted; nothing reads it. nullptr: no module of the unit writes them.
  void* scratch_gradient = nullptr;
  UseBuffers use;                 ///< of the open use
  float* partial = nullptr;       ///< (shard_numel) sum of the own replica alone, where replicas may wait
  float* accumulator = nullptr;   ///< (full_numel) unreduced gradients, where slots are no place to add them up
  bool sets_gradients = true;     ///< every module begins its gradients' sums itself: nothing is zeroed for it
  bool frozen = false;            ///< set if the unit does not train: no gradients, no updates
  bool fp32 = false;              ///< all its element types are fp32, whatever the policy's
  bool offloads_masters = false;  ///< they are fp32, and lie in host memory
  detail::ReducedHooks hooks;     ///< see Shards::on_reduced
  std::unique_ptr<detail::InitialValues> initial;  ///< see Shards::set_initial_values; empty: TensorOptions::init
  /// Indices of units of the same modules, for tensors of other kinds: gathered and dropped together with it.
  std::vector<std::size_t> beside;
  std::size_t first = 0;        ///< index of the unit that has this one in `beside`; else its own
  bool skips_gradients = true;  ///< no module writes gradients that are not wanted

 private:
  std::size_t index_;
  std::string name_;
  ElementTypes types_{};
  ShardingStrategy strategy_;
  Placement placement_;
  FlatLayout layout_;
  Range shard_;
  Range slice_;
  std::vector<Range> padding_;
  std::size_t gradients_ = 0;       ///< buffers of them that backward has got so far
  std::vector<std::size_t> begun_;  ///< by tensor: the last of these in which its sum has begun
};

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE
