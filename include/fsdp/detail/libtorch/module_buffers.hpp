// SPDX-License-Identifier: Apache-2.0
// Buffers of torch modules (running means of a BatchNorm) as buffers of an engine, and a guard of a Sharder while a
// module is registered.
#pragma once

#include <torch/torch.h>

#include <cstddef>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "fsdp/detail/engine/register_module.hpp"
#include "fsdp/detail/libtorch/device.hpp"
#include "fsdp/detail/libtorch/passes.hpp"
#include "fsdp/error.hpp"
#include "fsdp/module_buffers.hpp"
#include "fsdp/options.hpp"
#include "fsdp/tensor.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE::libtorch::detail {

/// The names of uses and their modules, in the order of registration.
using NamedModules = std::vector<std::pair<std::string, std::shared_ptr<torch::nn::Module>>>;

/// The buffers of modules, in the order of the modules. A tensor shared by several uses or modules is listed once,
/// under its first name.
class TorchBufferList {
 public:
  /// @throws UsageError if a buffer is sparse, or torch's current stream is not the engine's compute stream
  template <class E>
  TorchBufferList(E& engine, NamedModules const& modules) {
    TorchDevice<typename E::Device>::expect_current(engine.device(), engine.compute(), engine.rank(), "buffers");
    auto const device = TorchDevice<typename E::Device>::of(engine.device());
    for (auto const& [use, module] : modules)
      for (auto const& item : module->named_buffers())
        if (item.value().defined() && !has(item.value()))
          add(use.empty() ? item.key() : use + "." + item.key(), item.value(), device, engine.rank());
  }

  std::vector<ModuleBuffer> const& list() const { return list_; }
  /// Values were written to list(): tensors get them, and autograd notices.
  void written() {
    torch::NoGradGuard const no_grad;
    for (auto& [tensor, values] : tensors_)
      if (values.is_same(tensor)) {
        if (!tensor.is_inference()) tensor.unsafeGetTensorImpl()->bump_version();
      } else {
        tensor.copy_(values);
      }
  }

 private:
  static std::optional<DType> floating(at::ScalarType type) {
    switch (type) {
      case at::kFloat: return DType::f32;
      case at::kDouble: return DType::f64;
      case at::kBFloat16: return DType::bf16;
      case at::kHalf: return DType::f16;
      default: return {};
    }
  }
  bool has(at::Tensor const& tensor) const {
    for (auto const& known : tensors_)
      if (known.first.is_same(tensor)) return true;
    return false;
  }
  void add(std::string name, at::Tensor const& tensor, at::Device device, int rank) {
    FSDP_EXPECTS(tensor.layout() == at::kStrided, "rank {}: buffer '{}' is a {} tensor; expected a dense one", rank,
                 name, tensor.toString());
    bool const is_here =
        tensor.device().type() == device.type() && (!device.has_index() || tensor.device().index() == device.index());
    auto values = is_here && tensor.is_contiguous() ? tensor : tensor.detach().to(device).contiguous();
    auto& buffer = list_.emplace_back();
    buffer.name = std::move(name);
    buffer.type = c10::toString(tensor.scalar_type());
    buffer.shape = tensor.sizes().vec();
    buffer.data = values.data_ptr();
    buffer.bytes = values.nbytes();
    buffer.floating = floating(tensor.scalar_type());
    tensors_.emplace_back(tensor, std::move(values));
  }

  std::vector<ModuleBuffer> list_;
  std::vector<std::pair<at::Tensor, at::Tensor>>
      tensors_;  ///< with the values: a copy if the tensor is not contiguous, or on another device
};

/// @note Collective: yes; as average_buffers or broadcast_buffers.
template <class E>
void sync_module_buffers(E& engine, NamedModules const& modules, BufferSync how) {
  TorchBufferList buffers(engine, modules);
  if (how == BufferSync::average)
    average_buffers(engine, buffers.list());
  else
    broadcast_buffers(engine, buffers.list());
  if (engine.world_size() > 1 && (how == BufferSync::average || engine.rank() != 0)) buffers.written();
}

/// A module is being registered. If an exception ends its scope, the engine, the passes and the list of modules forget
/// it, and its parameters get their values back.
/// @tparam E  Engine
template <class E>
class [[nodiscard]] Registration {
 public:
  /// @param to  the unit that gets a further use, if that is there already
  Registration(E& engine, Passes& passes, NamedModules& modules, UnitId to = {})
      : passes_(&passes),
        modules_(&modules),
        units_(passes.units().size()),
        uses_(passes.use_count()),
        names_(modules.size()),
        declared_(engine.shards().core().declared, to) {}
  Registration(Registration&&) = delete;
  ~Registration() {
    if (!declared_.is_failing()) return;
    passes_->truncate(units_, uses_);
    while (modules_->size() > names_) modules_->pop_back();
  }

 private:
  using Declaration = std::remove_reference_t<decltype(std::declval<E&>().shards().core().declared)>;

  Passes* passes_;
  NamedModules* modules_;
  std::size_t units_, uses_, names_;  ///< that were there before
  fsdp::detail::Rollback<Declaration> declared_;
};

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE::libtorch::detail
