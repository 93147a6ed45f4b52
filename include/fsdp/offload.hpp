// SPDX-License-Identifier: Apache-2.0
// Optimizer state, masters and gradients in host memory: see [Note: Offloading].
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <type_traits>
#include <utility>
#include <vector>

#include "fsdp/detail/engine/callbacks.hpp"
#include "fsdp/detail/engine/executor.hpp"
#include "fsdp/detail/kernels/elementwise.hpp"
#include "fsdp/detail/step/operation.hpp"
#include "fsdp/detail/step/program.hpp"
#include "fsdp/engine.hpp"
#include "fsdp/error.hpp"
#include "fsdp/memory.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE::detail {

/// Zeroed host memory, page-locked if the device supports it, and entered in an account.
template <class D>
class AccountedHostMemory {
 public:
  AccountedHostMemory() = default;
  [[gnu::cold]] AccountedHostMemory(D const& device, MemoryAccount& account, std::int64_t bytes)
      : account_(&account),
        bytes_(bytes),
        memory_(std::make_unique<PinnedArray<D, std::byte>>(device, static_cast<std::size_t>(bytes))) {
    if (bytes > 0) std::memset(memory_->data(), 0, static_cast<std::size_t>(bytes));
    count(bytes_);
  }
  AccountedHostMemory(AccountedHostMemory&&) = delete;
  AccountedHostMemory& operator=(AccountedHostMemory&& other) noexcept {
    std::swap(account_, other.account_);
    std::swap(bytes_, other.bytes_);
    std::swap(memory_, other.memory_);
    return *this;
  }
  [[gnu::cold]] ~AccountedHostMemory() {
    if (memory_) count(-bytes_);
  }

  std::byte* data() const { return memory_ ? memory_->data() : nullptr; }

 private:
  void count(std::int64_t change) const {
    account_->reserve(MemoryTag::offloaded, change);
    account_->add_live(MemoryTag::offloaded, change);
  }

  MemoryAccount* account_ = nullptr;
  std::int64_t bytes_ = 0;
  std::unique_ptr<PinnedArray<D, std::byte>> memory_;
};

/// @tparam Core  an EngineCore
template <class Core>
class Offloading final : public OffloadHooks {
  using Device = typename Core::Device;
  using Unit = typename Core::Unit;
  using Param = typename Core::Param;

 public:
  explicit Offloading(Core& core) : core_(&core) {}

  [[gnu::cold]] void place(SlotMemory& memory) override {
    auto& core = *core_;
    auto const& program = core.program;
    core.streams.add_copy(core.device);
    std::int64_t masters = 0, gradients = 0;
    for_each_unit([&](Unit& unit) {
      if (unit.offloads_masters) masters += shard_bytes(unit);
      if (offloads_gradients(unit)) gradients += shard_bytes(unit);
    });
    host_masters_ = {core.device, core.account, masters};
    host_gradients_ = {core.device, core.account, gradients};
    staged_masters_ = stage(MemoryTag::parameters, program.staged_masters);
    staged_gradients_ = stage(MemoryTag::gradients, program.staged_gradients);
    homes_ = FixedArray<Home>(program.units.size());
    auto *master = host_masters_.data(), *gradient = host_gradients_.data();
    for_each_unit([&](Unit& unit) {
      auto& home = homes_[unit.index()] = {nullptr, unit.gradient};
      if (unit.offloads_masters) home.masters = std::exchange(master, master + shard_bytes(unit));
      if (offloads_gradients(unit))
        home.gradient = reinterpret_cast<float*>(std::exchange(gradient, gradient + shard_bytes(unit)));
      point_home(unit);
    });
    auto& slots = memory.slots[static_cast<std::size_t>(step::Pool::staged_gradient)];
    slots = FixedArray<std::byte*>(2);
    for (std::size_t slot = 0; slot < 2; ++slot)
      slots[slot] = staged_gradients_.data() + static_cast<std::int64_t>(slot) * program.staged_gradients;
  }
  [[gnu::cold]] void release() noexcept override {
    host_masters_ = {};
    host_gradients_ = {};
    unstage(MemoryTag::parameters, staged_masters_);
    unstage(MemoryTag::gradients, staged_gradients_);
    homes_ = {};
  }
  [[gnu::cold]] void initialized() override {
    for_each_unit([&](Unit& unit) {
      if (unit.offloads_masters) refresh(unit);
    });
  }
  [[gnu::cold]] HostMoments* make_moments(FixedArray<std::int64_t> starts, std::byte* slots,
                                          std::int64_t slot_bytes) override {
    auto moments = std::make_unique<Moments>();
    auto const units = core_->program.units.size();
    moments->memory = {core_->device, core_->account, starts[units]};
    moments->host = moments->memory.data();
    moments->starts = std::move(starts);
    moments->staged = FixedArray<std::byte*>(units);
    for (std::size_t u = 0; u < units; ++u) moments->staged[u] = slots + slot_of(u) * slot_bytes;
    return moments_.emplace_back(std::move(moments)).get();
  }
  [[gnu::cold]] void free_moments(HostMoments* freed) override {
    std::erase_if(moments_, [&](auto const& moments) { return moments.get() == freed; });
  }

  void begin_step() override {
    fetched_ = {none, none};
    for (auto& moments : moments_) moments->steps = false;
  }
  void before_write(std::size_t u, bool updates) override {
    auto& unit = *core_->declared.units()[u];
    if (!unit.trains()) return;
    if (updates) {
      fetch(u);
      auto const next = core_->program.next_that_trains(u + 1);
      if (next < core_->program.units.size() && core_->passes.has_gradient(next)) fetch(next);
    } else if (unit.offloads_masters) {
      fetched_ = {none, none};
      move_state(core_->program.fetches[u], u, false);
    }
    if (unit.offloads_masters) point_at(unit, staged_masters(u));
    if (updates && offloads_gradients(unit))
      unit.gradient = reinterpret_cast<float*>(staged_gradients_.data() + slot_of(u) * core_->program.staged_gradients);
  }
  void end_write(std::size_t u, bool updates, bool whole) override {
    auto& core = *core_;
    auto& unit = *core.declared.units()[u];
    if (!unit.trains()) return core.executor.remember(core.program.updates[u], whole);
    if (unit.offloads_masters && whole) refresh(unit);
    point_home(unit);
    core.executor.remember(core.program.updates[u], whole);
    fetched_[static_cast<std::size_t>(slot_of(u))] = none;
    if (whole) move_state(core.program.stores[u], u, updates);
  }
  void order_read(std::size_t u) override {
    auto const& operation = core_->program.reads[u];
    core_->executor.order(operation);
    core_->executor.remember(operation);
  }
  [[gnu::cold]] void await_stores() override { core_->device.synchronize(core_->streams[StreamKind::copy]); }

 private:
  static constexpr std::size_t none = ~std::size_t{0};

  struct Moments : HostMoments {
    AccountedHostMemory<Device> memory;
  };
  /// Place of a unit's state between updates. masters: nullptr if they are not offloaded
  struct Home {
    std::byte* masters = nullptr;
    float* gradient = nullptr;
  };

  template <class Act>
  void for_each_unit(Act const& act) {
    for (auto& unit : core_->declared.units()) act(*unit);
  }
  bool offloads_gradients(Unit const& unit) const { return core_->declared.offload.gradients && unit.trains(); }
  static std::int64_t shard_bytes(Unit const& unit) {
    return unit.shard_numel() * static_cast<std::int64_t>(sizeof(float));
  }
  static void point_at(Unit& unit, std::byte* masters) {
    unit.shard_data = masters;
    if (unit.types().master == dtype_of<std::remove_pointer_t<decltype(unit.master)>>)
      unit.master = reinterpret_cast<decltype(unit.master)>(masters);
  }
  void point_home(Unit& unit) const {
    auto const& home = homes_[unit.index()];
    if (home.masters != nullptr) point_at(unit, home.masters);
    unit.gradient = home.gradient;
  }
  /// Allocates two slots of `bytes` each.
  [[gnu::cold]] AccountedMemory<Device> stage(MemoryTag tag, std::int64_t bytes) {
    AccountedMemory<Device> memory{core_->device, core_->account, tag, static_cast<std::size_t>(2 * bytes)};
    core_->account.add_live(tag, 2 * bytes);
    return memory;
  }
  [[gnu::cold]] void unstage(MemoryTag tag, AccountedMemory<Device>& memory) noexcept {
    core_->account.add_live(tag, -static_cast<std::int64_t>(memory.bytes()));
    memory = {};
  }
  std::int64_t slot_of(std::size_t u) const { return core_->program.units[u].staging_slot; }
  std::byte* staged_masters(std::size_t u) const {
    return staged_masters_.data() + slot_of(u) * core_->program.staged_masters;
  }
  /// The shard that gathers read is rounded from the masters anew. @note Stream: on compute
  void refresh(Unit& unit) {
    kernels::cast(core_->device, *core_->compute, static_cast<float const*>(unit.shard_data),
                  static_cast<Param*>(unit.gathered), unit.shard_numel());
  }

  /// Fetches a unit's state before its update.
  void fetch(std::size_t u) {
    auto const& program = core_->program;
    auto& fetched = fetched_[static_cast<std::size_t>(slot_of(u))];
    if (fetched == u) return;
    fetched = none;
    move_state(program.fetches[u], u, true);
    if (program.gradient_fetches[u].size > 0) core_->passes.run(program.gradient_fetches[u]);
    fetched = u;
  }
  /// Fetches or stores a unit's masters, and its moments of the optimizers that take the step. @note Stream: on copy
  void move_state(step::Operation const& operation, std::size_t u, bool with_moments) {
    auto& core = *core_;
    if (operation.size == 0) return;
    auto const& unit = *core.declared.units()[u];
    auto& copy = core.streams[StreamKind::copy];
    bool const fetches = operation.primitive == step::Primitive::fetch;
    std::int64_t bytes = unit.offloads_masters ? shard_bytes(unit) : 0;
    for (auto const& moments : moments_)
      if (with_moments && moments->steps) bytes += moments->bytes(u);
    if (bytes == 0) return;
    core.executor.order(operation);
    auto span = core.trace.begin(copy, StreamKind::copy, unit.name(), name(operation.primitive), "optimizer", bytes);
    auto const move = [&](std::byte* home, std::byte* staged, std::int64_t size) {
      if (size > 0)
        core.device.copy_async(copy, fetches ? staged : home, fetches ? home : staged, static_cast<std::size_t>(size));
    };
    try {
      if (unit.offloads_masters) move(homes_[u].masters, staged_masters(u), shard_bytes(unit));
      for (auto const& moments : moments_)
        if (with_moments && moments->steps) move(moments->home(u), moments->staged[u], moments->bytes(u));
    } catch (...) {
      core.executor.remember(operation, false);
      throw;
    }
    span.end();
    core.executor.remember(operation);
  }

  Core* core_;
  AccountedHostMemory<Device> host_masters_, host_gradients_;
  AccountedMemory<Device> staged_masters_, staged_gradients_;
  FixedArray<Home> homes_;  ///< by unit
  std::vector<std::unique_ptr<Moments>> moments_;
  std::array<std::size_t, 2> fetched_{none, none};  ///< by slot: the unit whose state was fetched for its update
};

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE::detail

namespace fsdp::inline FSDP_VERSION_NAMESPACE {

/// Parts of the state that offload() keeps in host memory; at least one must be set.
struct OffloadOptions {
  bool moments = false;     ///< of all optimizers of the engine
  bool masters = false;     ///< fp32 masters of narrower parameters; a shard of parameters stays on the device
  bool gradients = false;   ///< gradient shards, between their reduction and their use
  bool parameters = false;  ///< refused: gathers need a shard on the device
};

/// Keeps state in host memory, page-locked on CUDA: see [Note: Offloading]. Call it before the engine is sealed.
/// Results are the same, bit by bit; with gradients offloaded, see docs/finetuning.md for a sum over several
/// micro-steps in a unit that no other rank shares. MemoryPlan::host and MemoryTag::offloaded are the bytes in host
/// memory. A device of your own whose kernels cannot read all host memory needs allocate_pinned (PinsMemory): norms and
/// averages read there.
/// @throws UsageError if the engine is sealed or offloads already, or `options` names nothing; ConfigError if it names
/// parameters, or masters that are the parameters
/// @note Collective: no; but all ranks offload the same, which sealing compares.
template <class E>
[[gnu::cold]] void offload(E& engine, OffloadOptions const& options) {
  auto const shards = engine.shards();
  auto const entry = shards.enter("offload");
  auto& core = shards.core();
  core.expect_unsealed("state was offloaded", "call offload");
  auto const rank = engine.rank();
  FSDP_EXPECTS(!core.offload, "rank {}: offload was called twice; name everything in one call", rank);
  if (options.parameters)
    fail<ConfigError>(
        "rank {}: offload: parameters stay on the device, sharded: gathers read them (PyTorch's offload_params). "
        "Offload moments, masters or gradients",
        rank);
  if (options.masters && std::is_same_v<typename E::Master, typename E::Param>)
    fail<ConfigError>(
        "rank {}: offload: masters are the parameters here, of type {}; they can be offloaded under a policy with "
        "narrower parameters, such as fsdp::Bf16",
        rank, name(dtype_of<typename E::Master>));
  FSDP_EXPECTS(options.moments || options.masters || options.gradients,
               "rank {}: offload: the options name nothing; set moments, masters or gradients", rank);
  using Core = std::remove_reference_t<decltype(core)>;
  core.offload = std::make_unique<detail::Offloading<Core>>(core);
  core.declared.offload = {options.moments, options.masters, options.gradients};
}

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE
