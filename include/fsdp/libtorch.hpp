// SPDX-License-Identifier: Apache-2.0
// FSDP for the C++ API of PyTorch: torch::nn modules whose parameters an engine shards, with autograd as it is.
#pragma once

#include <torch/torch.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "fsdp/checkpoint.hpp"
#include "fsdp/detail/libtorch/device.hpp"
#include "fsdp/detail/libtorch/module_buffers.hpp"
#include "fsdp/detail/libtorch/optimizer.hpp"
#include "fsdp/detail/libtorch/passes.hpp"
#include "fsdp/detail/libtorch/unit.hpp"
#include "fsdp/engine.hpp"
#include "fsdp/error.hpp"
#include "fsdp/json.hpp"
#include "fsdp/layout.hpp"
#include "fsdp/module_buffers.hpp"
#include "fsdp/options.hpp"
#include "fsdp/scopes.hpp"
#include "fsdp/strategy.hpp"
#include "fsdp/tensor.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE::libtorch {

/// The buffers of a Sharder's modules: their names, types, shapes and bytes. A checkpoint keeps rank 0's, once:
/// `sharder.sync_buffers()`, then `fsdp::save(engine, adamw, folder, {{"buffers", buffers(sharder)}})`.
/// @tparam Sharder  fsdp::libtorch::Sharder
/// @note Collective: no.
template <class Sharder>
checkpoint::Json buffers(Sharder const& sharder) {
  detail::TorchBufferList const buffers(sharder.engine(), sharder.modules());
  return buffers_to_json(sharder.engine(), buffers.list());
}

/// Sets the buffers of a Sharder's modules to what buffers() returned, on any number of ranks: `load_buffers(sharder,
/// loaded.extra["buffers"])`.
/// @throws ConfigError if a buffer is missing, or has another type or shape: no buffer has changed then
/// @note Collective: no; all ranks call it.
template <class Sharder>
void load_buffers(Sharder const& sharder, checkpoint::Json const& saved) {
  detail::TorchBufferList buffers(sharder.engine(), sharder.modules());
  buffers_from_json(sharder.engine(), buffers.list(), saved);
  buffers.written();
}

namespace detail {

/// @tparam E  Engine
template <class E>
class UsesOf final : public EngineUses {
 public:
  UsesOf(E& engine, std::shared_ptr<NamedModules const> modules)
      : engine_(&engine), held_(engine), modules_(std::move(modules)) {}

  int rank() const override { return engine_->rank(); }
  void begin(Pass pass, UseId use) override {
    try {
      held_.begin(pass, use);
    } catch (OrderError const& error) {
      throw OrderError(
          formatted("{}. After an exception between units, call Sharder::discard_gradients() on all ranks; a second "
                    "call of a unit is registered with Sharder::share, and a pass that leaves units out with "
                    "Engine::add_path",
                    error.what()));
    }
  }
  void end() override { held_.end(); }
  void abandon() noexcept override { held_.abandon(); }
  bool is_open() const override { return static_cast<bool>(held_); }
  TorchBuffers buffers(std::size_t of, bool backward) const override {
    auto const& buffers = held_.buffers(of);
    bool const wanted = backward && held_.wants_gradients(held_.unit(of));
    return {const_cast<void*>(buffers.parameters), wanted ? buffers.gradients : nullptr};
  }
  bool begin_write(std::size_t of, std::size_t index) override { return held_.unit(of).begin_write(index); }
  std::size_t turns_done() const override { return engine_->shards().core().passes.turns_done(); }
  void discard_gradients() override { engine_->discard_gradients(); }
  void broadcast_buffers() override { sync_module_buffers(*engine_, *modules_, BufferSync::broadcast); }
  void expect_stream(std::string_view unit) const override {
    TorchDevice<typename E::Device>::expect_current(engine_->device(), engine_->compute(), engine_->rank(), unit);
  }

 private:
  E* engine_;
  HeldUse<E> held_;
  std::shared_ptr<NamedModules const> modules_;
};

}  // namespace detail

/// A torch::nn module whose parameters live in a unit of an engine. Made by Sharder; copies refer to the same module.
template <class M>
class Sharded {
 public:
  /// Only Sharder::shard and Sharder::share call this. @param use  number among the uses of the Sharder
  Sharded(std::shared_ptr<detail::Passes> passes, std::shared_ptr<M> module, std::size_t use)
      : passes_(std::move(passes)), module_(std::move(module)), use_(use) {}

  /// Gathers the unit, starts the next units' gathers, calls the module's forward, and reshards the unit.
  /// @return what forward returns. It must not refer to parameters
  /// @throws UsageError if it does, or after a backward() that has ended with an exception; OrderError if another unit
  /// was declared next
  /// @note Stream: the current stream of torch, which is the engine's compute stream.
  /// @note Collective: all ranks call the units in the same order; at most one all-gather for this unit.
  template <class... Args>
  auto operator()(Args&&... args) const {
    return call([&](M& module) { return module.forward(std::forward<Args>(args)...); });
  }
  /// As operator(), with another function of the module: `unit.call([&](auto& m) { return m.encode(x); })`.
  template <class Call>
  auto call(Call&& function) const {
    static_assert(!std::is_void_v<std::invoke_result_t<Call, M&>>,
                  "fsdp: a function that runs a sharded module returns its outputs");
    FSDP_EXPECTS(passes_ != nullptr, "a Sharded was called that was moved from");
    ForwardUse use(*passes_, use_);
    auto out = function(*module_);
    each_tensor(out, [&](at::Tensor const& tensor) { passes_->watch(tensor); });
    use.end();
    return out;
  }

  M* operator->() const { return module_.get(); }            ///< the torch module; nullptr after a move
  M& operator*() const { return *module_; }                  ///< the torch module; not to be called after a move
  std::shared_ptr<M> const& ptr() const { return module_; }  ///< shared owner of the torch module; nullptr after a move
  /// The use in the declared order, which prefetch lists and paths name.
  UseId use() const { return passes_->id_of(use_); }
  operator UseId() const { return use(); }  ///< the id that use() returns, so that lists of uses can contain the module
  /// The unit of the engine that has the module's parameters.
  UnitId unit() const { return passes_->unit_of(use_).id(); }
  /// The number of the use among those of the Sharder, from 0.
  std::size_t number() const { return use_; }

 private:
  class ForwardUse {
   public:
    ForwardUse(detail::Passes& passes, std::size_t use) : passes_(&passes) { passes.begin_forward(use); }
    ForwardUse(ForwardUse const&) = delete;
    ~ForwardUse() {
      if (passes_ != nullptr) passes_->abandon_forward();
    }
    void end() {
      passes_->end_forward();
      passes_ = nullptr;
    }

   private:
    detail::Passes* passes_;  ///< nullptr: it has ended
  };

  std::shared_ptr<detail::Passes> passes_;
  std::shared_ptr<M> module_;
  std::size_t use_;
};

/// Registers torch::nn modules as the units of an engine, in forward order. The engine must outlive it, the modules,
/// and the graphs of their outputs.
///
/// ```
/// fsdp::Engine engine{mesh, fsdp::FullShard{}, {.prefetch = 1}, compute};
/// fsdp::libtorch::Sharder sharder{engine};
/// auto embed = sharder.shard(Embed(d), "embed");
/// auto head = sharder.shard(Head(d), "head");
/// fsdp::AdamW adamw{engine, {.lr = 1e-3f}};
/// auto loss = cross_entropy(head(embed(ids)), targets);  // a step
/// loss.backward();
/// adamw.step(fsdp::clip_grad_norm(engine, 1.0f));
/// ```
/// Modules are built one at a time: each rank keeps its slice of the initial values and frees the rest. All ranks build
/// a module with the same values: seed torch with the same number first (torch::manual_seed). Where ranks are threads,
/// they share the generator: hold a mutex from the seed to shard().
///
/// A parameter without requires_grad is frozen: see UnitOptions. Parameters have the engine's types (Precision): with
/// fsdp::Bf16, an fp32 module computes in bf16.
///
/// Buffers keep their types, and each rank has them whole. The first forward of a sharded module gives all ranks rank
/// 0's buffers of all modules; then each rank changes its own, until sync_buffers().
/// @tparam E  Engine. On the host, its compute stream is inline (host::Stream::inline_stream); on CUDA, it is torch's
/// current stream (fsdp/libtorch_cuda.hpp)
template <class E>
class Sharder {
 public:
  /// Registers nothing yet. @throws UsageError on the host if the engine's compute stream is not inline
  explicit Sharder(E& engine)
      : engine_(&engine),
        modules_(std::make_shared<detail::NamedModules>()),
        passes_(std::make_shared<detail::Passes>(std::make_unique<detail::UsesOf<E>>(engine, modules_))) {
    detail::TorchDevice<typename E::Device>::expect_compute(engine.compute(), engine.rank());
  }

  /// Registers a module as the next unit in forward order. Tensor names are "name." and those of named_parameters();
  /// one parameter of several names has the first. The engine is sealed by the first use, optimizer or checkpoint. If
  /// it throws, engine and module are as before.
  /// @param strategy  of the unit, as in Engine::add_unit; not set: the engine's
  /// @throws UsageError if a parameter belongs to another unit, has no fp32, bf16 or fp16 elements, or the engine is
  /// sealed
  template <class M>
  Sharded<M> shard(torch::nn::ModuleHolder<M> const& module, std::string const& name,
                   std::optional<ShardingStrategy> const& strategy = {}) {
    return shard(module.ptr(), name, strategy);
  }
  /// Registers the module of a shared pointer as the next unit in forward order. @throws UsageError also for nullptr
  template <class M>
  Sharded<M> shard(std::shared_ptr<M> module, std::string const& name,
                   std::optional<ShardingStrategy> const& strategy = {}) {
    FSDP_EXPECTS(module != nullptr, "rank {}: Sharder::shard of '{}': the module is nullptr", engine_->rank(), name);
    detail::Registration<E> const registration(*engine_, *passes_, *modules_);
    auto const use = declare(*module, name, strategy);
    modules_->emplace_back(name, module);
    passes_->units().back()->commit();
    return {passes_, std::move(module), use};
  }
  /// Registers one more use of the unit of `of`, next in forward order: a head that reads the embedding's weight, or a
  /// second call of the same module. The unit is held from its first use to its last; gradients are reduced once. If it
  /// throws, the engine is as before.
  /// @param name  of the use, for messages
  /// @throws UsageError if the module has parameters that the unit does not have
  template <class Of, class M>
  Sharded<M> share(Sharded<Of> const& of, torch::nn::ModuleHolder<M> const& module, std::string const& name) {
    return share(of, module.ptr(), name);
  }
  /// Registers one more use of the unit of `of`, next in forward order, by the module of a shared pointer.
  template <class Of, class M>
  Sharded<M> share(Sharded<Of> const& of, std::shared_ptr<M> module, std::string const& name) {
    auto& unit = passes_->unit_of(of.number());
    for (auto const& item : module->named_parameters())
      FSDP_EXPECTS(
          find(unit, item.value()) != nullptr,
          "rank {}: '{}' is a further use of unit '{}', and its module has a parameter '{}' that the unit does "
          "not have; put this parameter into a module of its own",
          engine_->rank(), name, unit.name(), item.key());
    std::vector<DeclaredTensor> tensors;
    for (auto const& parameter : unit.parameters()) tensors.push_back(declared(unit, parameter));
    std::vector<TensorId> places;
    detail::Registration<E> const registration(*engine_, *passes_, *modules_, unit.id());
    auto const id = engine_->declare_use(unit.id(), name, std::move(tensors), places);
    auto const use = passes_->add_use(unit, id, name);
    modules_->emplace_back(name, module);
    return {passes_, std::move(module), use};
  }

  /// As Engine::discard_gradients; also after backward() has ended with an exception, on all ranks: training then goes
  /// on as if the pass had not been.
  void discard_gradients() { passes_->discard_gradients(); }

  /// Gives all ranks the same buffers of all modules: before an evaluation or a save. A buffer of several uses counts
  /// once.
  /// @param how  average: the mean over ranks; of other types than fp32, fp64, bf16 and fp16, rank 0's values
  /// @throws OrderError on every rank if ranks' modules have other buffers; no buffer has changed then
  /// @note Stream: behind the work of all streams of the engine. The calling thread waits for the values.
  /// @note Collective: yes; seals the engine. As average_buffers and broadcast_buffers.
  void sync_buffers(BufferSync how = BufferSync::average) { detail::sync_module_buffers(*engine_, *modules_, how); }

  E& engine() const { return *engine_; }  ///< the engine that shards the modules
  /// Names and modules of all uses: fsdp::libtorch::buffers saves their buffers.
  std::vector<std::pair<std::string, std::shared_ptr<torch::nn::Module>>> const& modules() const { return *modules_; }

 private:
  static detail::TorchParameter* find(detail::TorchUnit& unit, at::Tensor const& tensor) {
    for (auto& parameter : unit.parameters())
      if (parameter.tensor.is_same(tensor)) return &parameter;
    return nullptr;
  }
  /// As the unit's first use declared it.
  DeclaredTensor declared(detail::TorchUnit const& unit, detail::TorchParameter const& parameter) const {
    auto const& info =
        engine_->shards().core().declared.unit(unit.id().index, parameter.unit).layout().tensors()[parameter.index];
    return {info.name, info.shape, {.decay = info.decay, .init = info.init, .frozen = !parameter.trains}, false, true};
  }
  /// @return the number of the use
  std::size_t declare(torch::nn::Module const& module, std::string const& name,
                      std::optional<ShardingStrategy> const& strategy) {
    std::vector<std::pair<std::string, at::Tensor>> found;
    bool trains = false;
    for (auto const& item : module.named_parameters()) {
      auto const& tensor = item.value();
      auto const full = name.empty() ? item.key() : name + "." + item.key();
      bool known = false;
      for (auto const& earlier : found) known = known || earlier.second.is_same(tensor);
      if (known) continue;
      for (auto const& unit : passes_->units())
        FSDP_EXPECTS(find(*unit, tensor) == nullptr,
                     "rank {}: parameter '{}' belongs to unit '{}' already; a module that reads it is a further use of "
                     "the unit (Sharder::share), and a module whose parts are units is none itself",
                     engine_->rank(), full, unit->name());
      detail::expect_elements(tensor, full, engine_->rank());
      found.emplace_back(full, tensor);
      trains = trains || tensor.requires_grad();
    }
    std::vector<DeclaredTensor> tensors;
    for (auto const& [full, tensor] : found)
      tensors.push_back({full,
                         tensor.sizes().vec(),
                         {.init = init::given(detail::hash_of(tensor)), .frozen = trains && !tensor.requires_grad()},
                         false,
                         true});
    UnitId id;
    std::vector<TensorId> places;
    auto const use = engine_->declare_use(UnitOptions{.strategy = strategy, .frozen = !found.empty() && !trains}, name,
                                          std::move(tensors), places, id);
    auto unit = std::make_unique<detail::TorchUnit>(name, id);
    for (std::size_t i = 0; i < found.size(); ++i)
      unit->add({found[i].first, found[i].second, unit_number(places[i]), tensor_index(places[i]),
                 found[i].second.requires_grad()});
    adopt(*unit);
    passes_->units().push_back(std::move(unit));
    return passes_->add_use(*passes_->units().back(), use, name);
  }
  /// The engine gets the parameters' initial values, and the parameters storages that follow its buffers.
  void adopt(detail::TorchUnit& unit) {
    auto const shards = engine_->shards();
    auto& first = shards[unit.id()];
    auto const device = detail::TorchDevice<typename E::Device>::of(engine_->device());
    auto const of = [&](std::size_t number) ->
        typename E::Unit& { return number == 0 ? first : shards[first.beside[number - 1]]; };
    for (std::size_t number = 0; number <= first.beside.size(); ++number) {
      auto& engine_unit = of(number);
      auto const& tensors = engine_unit.layout().tensors();
      auto const types = engine_unit.declared_types();
      unit.add_storages(tensors.empty() ? 0 : static_cast<std::size_t>(tensors.back().range().end), types.parameter,
                        types.gradient, device);
      detail::KeptValues kept;
      for (auto const& part : shards.shard_segments(engine_unit))
        for (auto const& parameter : unit.parameters())
          if (parameter.unit == number && parameter.index == part.tensor)
            kept.add(parameter.name, part.first, part.count, parameter.tensor);
      shards.set_initial_values(engine_unit, std::move(kept));
    }
    unit.finish(
        [&](detail::TorchParameter const& parameter) {
          auto const& engine_unit = of(parameter.unit);
          return std::pair(engine_unit.layout().tensors()[parameter.index].offset, engine_unit.declared_types());
        },
        [weak = passes_->weak_from_this()](detail::TorchParameter& parameter) {
          detail::Passes::come(weak, parameter);
        });
  }

  E* engine_;
  std::shared_ptr<detail::NamedModules> modules_;
  std::shared_ptr<detail::Passes> passes_;
};
template <class E>
Sharder(E&) -> Sharder<E>;

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE::libtorch
