// SPDX-License-Identifier: Apache-2.0
// A unit's torch parameters: views of storages that follow the engine's buffers.
#pragma once

#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/torch.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "fsdp/engine_options.hpp"
#include "fsdp/error.hpp"
#include "fsdp/layout.hpp"
#include "fsdp/libtorch/storage.hpp"
#include "fsdp/tensor.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE::libtorch::detail {

constexpr at::ScalarType scalar_type(DType type) {
  switch (type) {
    case DType::bf16: return at::kBFloat16;
    case DType::f16: return at::kHalf;
    default: return at::kFloat;
  }
}

/// The node that accumulates a parameter's gradient: std::shared_ptr before torch 2.12, c10::intrusive_ptr since.
using Accumulator = decltype(torch::autograd::impl::grad_accumulator(std::declval<at::Tensor const&>()));

struct TorchParameter {
  std::string name;  ///< full
  at::Tensor tensor;
  std::size_t unit = 0;   ///< number of its unit among those of its module: see FlatParam::beside
  std::size_t index = 0;  ///< in that unit's layout
  bool trains = true;
  at::Tensor weight{};                              ///< view of the storage of weights
  at::Tensor gradient{};                            ///< view of the storage of gradients; undefined: it does not train
  at::Tensor refused_weight{}, refused_gradient{};  ///< see [Note: Refusals before torch 2.2]
  Accumulator accumulator{};                        ///< kept, so that its hook is
  std::uintptr_t hook = 0;                          ///< of the accumulator
  bool has_come = false;                            ///< backward: the gradient of the use that is open
  std::uint32_t version = 0;                        ///< torch's count of writes, when the use began
};

/// Buffers of one of the units of a use. Null pointers: there are none.
struct TorchBuffers {
  void* parameters = nullptr;
  void* gradients = nullptr;  ///< null also where gradients are not wanted
};

/// Parameters of a module, which share the storages of one engine's unit (and of those beside it, for parameters that
/// are frozen). Outside uses, storages refuse accesses; `grad()` of a parameter is then such a tensor too, so that an
/// optimizer or a clipping function of torch that still works on the modules' parameters is refused, not ignored.
class TorchUnit {
 public:
  TorchUnit(std::string name, UnitId id) : id_(id), name_(std::move(name)) {}
  TorchUnit(TorchUnit const&) = delete;
  /// Before commit(), parameters get their values and gradients back.
  ~TorchUnit() {
    for (std::size_t i = 0; i < before_.size(); ++i) {
      auto& parameter = parameters_[i];
      if (parameter.accumulator) parameter.accumulator->del_post_hook(parameter.hook);
      if constexpr (storages_refuse)
        parameter.tensor.set_data(before_[i].first);
      else
        RefusedTensors::assign(parameter.tensor, before_[i].first);
      parameter.tensor.mutable_grad() = before_[i].second;
    }
    for (auto const text : texts_) RefusedTensors::forget(text);
  }

  std::string const& name() const { return name_; }
  UnitId id() const { return id_; }
  std::vector<TorchParameter>& parameters() { return parameters_; }

  /// Declares a parameter. @pre finish() was not called yet
  void add(TorchParameter parameter) { parameters_.push_back(std::move(parameter)); }
  /// Adds the storages of the next of the engine's units. @param elements  to the end of its last tensor
  void add_storages(std::size_t elements, DType parameter, DType gradient, at::Device device) {
    weights_.emplace_back(elements * size_of(parameter), device,
                          formatted("unit '{}': its parameters are sharded, and are there only in its forward and "
                                    "backward; call the unit that Sharder::shard returned, and give the engine to "
                                    "optimizers",
                                    name_));
    gradients_.emplace_back(
        elements * size_of(gradient), device,
        formatted("unit '{}': its gradients are sharded, and the engine zeroes them; give the engine to "
                  "fsdp::clip_grad_norm and to optimizers, read gradients with fsdp::export_gradients, "
                  "and call no zero_grad",
                  name_));
  }
  /// Parameters become views of the storages.
  /// @param offset_of  (parameter) -> element of its unit
  /// @param come  called as come(parameter) when autograd has accumulated a gradient of a use that is open
  template <class Info, class Come>
  void finish(Info const& info_of, Come const& come) {
    torch::NoGradGuard const no_grad;
    before_.reserve(parameters_.size());
    for (auto& parameter : parameters_) {
      before_.emplace_back(parameter.tensor.detach(), parameter.tensor.mutable_grad());
      auto const [offset, types] = info_of(parameter);
      auto const& tensor = parameter.tensor;
      auto const options = at::TensorOptions().dtype(scalar_type(types.parameter));
      parameter.weight = weights_[parameter.unit].view(offset, tensor.sizes(), options);
      tensor.set_data(parameter.weight);
      if constexpr (!storages_refuse) parameter.refused_weight = refused(parameter.weight, weights_[parameter.unit]);
      if (!parameter.trains) continue;
      parameter.gradient =
          gradients_[parameter.unit].view(offset, tensor.sizes(), options.dtype(scalar_type(types.gradient)));
      if constexpr (!storages_refuse)
        parameter.refused_gradient = refused(parameter.gradient, gradients_[parameter.unit]);
      parameter.accumulator = torch::autograd::impl::grad_accumulator(tensor);
      parameter.hook = parameter.accumulator->add_post_hook(std::make_unique<Hook<Come>>(come, &parameter));
    }
    close();
  }
  /// The unit is registered: frees the parameters' former values.
  void commit() noexcept { before_.clear(); }

  /// A use begins. @param buffers_of  (number of the unit) -> TorchBuffers
  template <class BuffersOf>
  void open(BuffersOf const& buffers_of, bool backward) {
    for (std::size_t of = 0; of < weights_.size(); ++of) {
      TorchBuffers const buffers = buffers_of(of);
      weights_[of].set(buffers.parameters);
      if (buffers.gradients != nullptr) gradients_[of].set(buffers.gradients);
    }
    for (auto& parameter : parameters_) {
      if constexpr (!storages_refuse) RefusedTensors::assign(parameter.tensor, parameter.weight);
      parameter.has_come = false;
      parameter.version = version_of(parameter.tensor);
      if (backward && parameter.trains) parameter.tensor.mutable_grad().reset();
    }
  }
  /// A parameter that something has written since the use began: the write would be lost when the unit is resharded.
  TorchParameter const* written() const {
    for (auto const& parameter : parameters_)
      if (parameter.version != version_of(parameter.tensor)) return &parameter;
    return nullptr;
  }
  /// A use has ended.
  void close() {
    for (auto& storage : weights_) storage.clear();
    for (auto& storage : gradients_) storage.clear();
    for (auto& parameter : parameters_) {
      if constexpr (!storages_refuse) RefusedTensors::assign(parameter.tensor, parameter.refused_weight);
      if (parameter.trains) refuse_gradient(parameter);
    }
  }
  /// `grad()` is a tensor that cannot be accessed.
  static void refuse_gradient(TorchParameter& parameter) {
    parameter.tensor.mutable_grad() = storages_refuse ? parameter.gradient : parameter.refused_gradient;
  }
  bool holds(at::Tensor const& tensor) const {
    for (auto const& storage : weights_)
      if (storage.holds(tensor)) return true;
    return false;
  }

 private:
  template <class Come>
  class Hook final : public torch::autograd::FunctionPostHook {
   public:
    Hook(Come come, TorchParameter* parameter) : come_(std::move(come)), parameter_(parameter) {}
    torch::autograd::variable_list operator()(torch::autograd::variable_list const& outputs,
                                              torch::autograd::variable_list const&) override {
      come_(*parameter_);
      return outputs;
    }

   private:
    Come come_;
    TorchParameter* parameter_;
  };

  static std::uint32_t version_of(at::Tensor const& tensor) {
    return tensor.is_inference() ? 0 : tensor.unsafeGetTensorImpl()->version_counter().current_version();
  }
  at::Tensor refused(at::Tensor const& like, UnitStorage const& storage) {
    texts_.push_back(RefusedTensors::add(storage.refusal()));
    return RefusedTensors::make(like, texts_.back());
  }

  UnitId id_;
  std::string name_;
  std::vector<std::int64_t> texts_;                        ///< of RefusedTensors
  std::vector<TorchParameter> parameters_;                 ///< in place once finish() was called: hooks point at them
  std::vector<UnitStorage> weights_, gradients_;           ///< by number of the unit
  std::vector<std::pair<at::Tensor, at::Tensor>> before_;  ///< values and gradients of parameters, until commit()
};

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE::libtorch::detail
