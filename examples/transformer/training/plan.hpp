// SPDX-License-Identifier: Apache-2.0
// `plan`: the memory that a rank of a training run needs, for several batch sizes, with and without recomputation.
#pragma once

#include <fmt/format.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <mutex>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "fsdp/error.hpp"
#include "fsdp/fsdp.hpp"
#include "fsdp/host.hpp"
#include "fsdp/offload.hpp"
#include "fsdp/program.hpp"
#include "transformer/layers/activation_plan.hpp"
#include "transformer/math/gemm_host.hpp"
#include "transformer/run/choices.hpp"
#include "transformer/run/table.hpp"
#include "transformer/run/variants.hpp"
#include "transformer/training/engine_options.hpp"
#include "transformer/training/planned_run.hpp"

namespace transformer {

/// Addresses for more bytes than the machine has addresses: nobody may read or write there. They do not overlap while
/// they are in use. Any thread.
class PretendedAddresses {
 public:
  static void* take(std::size_t bytes) {
    std::lock_guard const lock(mutex_);
    auto const size = (bytes + page - 1) / page * page;
    if (size < bytes || next_ + size < next_)
      fsdp::fail<fsdp::ConfigError>("plan: {} bytes are too many; use a smaller batch_size, block_size or model",
                                    bytes);
    ++taken_;
    return reinterpret_cast<void*>(std::exchange(next_, next_ + size));
  }
  /// @return whether take() has returned it
  static bool give_back(void* memory) {
    if (reinterpret_cast<std::uintptr_t>(memory) < first) return false;
    std::lock_guard const lock(mutex_);
    if (--taken_ == 0) next_ = first;
    return true;
  }

 private:
  static constexpr std::size_t page = 4096;
  static constexpr std::uintptr_t first = std::uintptr_t{1} << 60;  // no memory lies there

  inline static std::mutex mutex_;
  inline static std::uintptr_t next_ = first;
  inline static std::size_t taken_ = 0;
};

/// A device on which nothing runs: models are made on it for the sizes of their memory. It allocates addresses without
/// memory behind them.
/// @tparam Blocks  sizes are those of a GPU; otherwise of the host
template <bool Blocks>
struct PlanDevice : fsdp::host::Device {
  static constexpr bool thread_blocks = Blocks;

  void* allocate(std::size_t bytes) const {
    if (bytes == 0) return nullptr;
    void* const memory =
        ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return memory == MAP_FAILED ? PretendedAddresses::take(bytes) : memory;
  }
  void deallocate(void* memory, std::size_t bytes) const noexcept {
    if (memory != nullptr && !PretendedAddresses::give_back(memory)) ::munmap(memory, bytes);
  }
};

/// Ranks that never communicate: an engine of them is not sealed.
template <class D>
class PlanWorld {
 public:
  using Device = D;
  using Stream = typename D::Stream;

  PlanWorld(int size, D device) : size_(size), device_(std::move(device)) {}

  int rank() const { return 0; }
  int size() const { return size_; }
  D const& device() const { return device_; }
  PlanWorld split(int, int, std::string_view) { return *this; }
  void* allocate(std::size_t bytes) { return device_.allocate(bytes); }
  void deallocate(void* memory, std::size_t bytes) noexcept { device_.deallocate(memory, bytes); }
  fsdp::Ticket all_gather(Stream&, auto const*, auto*, std::size_t, fsdp::Label) { return {}; }
  fsdp::Ticket reduce_scatter(Stream&, auto const*, auto*, std::size_t, fsdp::Label) { return {}; }
  fsdp::Ticket all_reduce(Stream&, auto const*, auto*, std::size_t, fsdp::Label) { return {}; }
  fsdp::Ticket broadcast(Stream&, auto*, std::size_t, int, fsdp::Label) { return {}; }
  void wait_for_peers(Stream&, fsdp::Ticket, fsdp::WaitSite) {}
  std::vector<std::string> exchange(std::string const& text, std::string_view) {
    return std::vector<std::string>(static_cast<std::size_t>(size_), text);
  }

 private:
  int size_;
  D device_;
};

/// Multiplies nothing.
template <bool Blocks>
class Gemm<PlanDevice<Blocks>> {
 public:
  explicit Gemm(PlanDevice<Blocks> const&) {}
  static constexpr bool adds_bias = Gemm<fsdp::host::Device>::adds_bias;
  template <class T>
  static bool has_matrix_units() {
    return Gemm<fsdp::host::Device>::has_matrix_units<T>();
  }
};

/// A rank's memory, and what the step and the activations are planned from.
struct PlannedRank {
  PlannedMemory memory;
  fsdp::MemoryPlanInput input;
  ActivationPlan activations;
};

/// @tparam P  precision
/// @throws fsdp::ConfigError if there is no such model or run
template <class Program, class P, class Device>
PlannedRank plan_rank(Settings const& settings, typename Program::Config const& config, Device const& device) {
  using World = PlanWorld<Device>;
  using Engine = fsdp::Engine<World, P>;
  fsdp::Mesh<World> mesh(World(static_cast<int>(settings.ranks), device));
  Engine engine(mesh, strategy_of(settings), engine_options(settings));
  typename Program::template Model<Engine> const model(engine, config, settings.batch_size, settings.block_size,
                                                       decoder_options<Device>(settings, config.layer_parameters()));
  auto input = engine.plan_input();
  auto const choice = offloaded(settings, !std::is_same_v<typename P::Master, typename P::Param>);
  input.offload = {choice.moments, choice.masters, choice.gradients};
  auto const& account = engine.account();
  PlannedMemory const memory{fsdp::memory_plan(input), account.reserved(fsdp::MemoryTag::activations),
                             account.reserved(fsdp::MemoryTag::workspace), account.reserved(fsdp::MemoryTag::scalars)};
  return {memory, std::move(input), model.plan()};
}

/// The device and type for which `plan` computes: a GPU and bfloat16 where the settings do not say.
inline bool plans_gpu(Settings const& settings) { return settings.device != "cpu"; }
inline bool plans_bf16(Settings const& settings) {
  return settings.dtype.empty() ? plans_gpu(settings) : settings.dtype != "float32";
}
/// Calls `act(device, bf16)` with that device.
template <class Act>
auto on_planned_device(Settings const& settings, Act const& act) {
  if (plans_gpu(settings)) return act(PlanDevice<true>{}, plans_bf16(settings));
  PlanDevice<false> device;
  device.threads = static_cast<int>(std::max<std::int64_t>(1, settings.threads));
  return act(device, plans_bf16(settings));
}
template <class Program>
PlannedMemory plan_memory(Settings const& settings, typename Program::Config const& config) {
  return on_planned_device(settings, [&](auto const& device, bool bf16) {
    return bf16 ? plan_rank<Program, fsdp::Bf16>(settings, config, device).memory
                : plan_rank<Program, fsdp::Fp32>(settings, config, device).memory;
  });
}

/// Prints a table. @param config  of the model
/// @return the exit code
template <class Program>
int print_plan(Settings settings, typename Program::Config const& config) {
  if (!settings.was_given(name_of(&Settings::activation_checkpointing))) settings.activation_checkpointing = "both";
  auto const variants = variants_of(settings, {1, 2, 4, 8, 16, 32});
  bool const gpu = settings.device != "cpu";
  std::string_view const dtype = !settings.dtype.empty() ? std::string_view(settings.dtype)
                                 : gpu                   ? "bfloat16"
                                                         : "float32";
  fmt::print("{} parameters, {} rank{}, strategy {}, {} on {}, AdamW, sequences of {} tokens; GB (10^9 bytes) a rank\n",
             config.parameters(), settings.ranks, settings.ranks == 1 ? "" : "s", settings.strategy, dtype,
             gpu ? "a GPU" : "cpu", settings.block_size);
  fmt::print("{:>10}  {:>24}  {:>10}  {:>9}  {:>9}  {:>7}  {:>11}  {:>9}  {:>7}\n", "batch_size",
             name_of(&Settings::activation_checkpointing), "parameters", "gradients", "optimizer", "buffers",
             "activations", "workspace", "total");
  for (auto const& recomputation : variants.recomputation) {
    for (auto const batch : variants.batch_sizes) {
      settings.activation_checkpointing = recomputation;
      settings.batch_size = batch;
      auto const plan = plan_memory<Program>(settings, config);
      auto const gb = [](std::int64_t bytes) { return static_cast<double>(bytes) / 1e9; };
      fmt::print("{:>10}  {:>24}  {:>10.3f}  {:>9.3f}  {:>9.3f}  {:>7.3f}  {:>11.3f}  {:>9.3f}  {:>7.3f}\n", batch,
                 recomputation, gb(plan.engine.parameters), gb(plan.engine.gradients), gb(plan.engine.optimizer),
                 gb(plan.engine.gather + plan.engine.reduce), gb(plan.activations), gb(plan.workspace),
                 gb(plan.total()));
    }
  }
  std::fflush(stdout);
  return 0;
}

}  // namespace transformer
