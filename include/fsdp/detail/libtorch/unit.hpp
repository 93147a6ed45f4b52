// SPDX-License-Identifier: Apache-2.0
// A unit's torch parameters: views of storages whose address an engine sets, and that refuse accesses, by name,
// while it is not set.
#pragma once

#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/library.h>
#include <torch/torch.h>

#include <ATen/ATen.h>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "fsdp/error.hpp"
#include "fsdp/layout.hpp"
#include "fsdp/options.hpp"
#include "fsdp/tensor.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE::libtorch::detail {

/// Storages of this version of torch can refuse accesses with a text (torch 2.2 and newer).
template <class S>
concept RefusesAccesses = requires(S& storage) {
  storage.release_data_and_set_meta_custom_data_ptr_error_msg_(std::string());
  storage.clear_data_ptr_access_error_msg_();
};
inline constexpr bool storages_refuse = RefusesAccesses<c10::StorageImpl>;

/// A storage that many tensors share: parameters, their views, and what autograd has saved of them. Its address follows
/// the engine's buffers, so that all of these do.
class UnitStorage {
 public:
  /// @param refusal  text of the error of an access while the address is not set
  UnitStorage(std::size_t bytes, at::Device device, std::string refusal)
      : device_(device),
        refusal_(std::move(refusal)),
        storage_(c10::Storage::use_byte_size_t(), bytes, at::DataPtr(nullptr, device), nullptr, false) {}

  /// A contiguous tensor in the storage. @pre clear() was not called yet: torch refuses new views then
  at::Tensor view(std::int64_t offset, at::IntArrayRef sizes, at::TensorOptions options) const {
    std::vector<std::int64_t> strides(sizes.size(), 1);
    for (std::size_t d = sizes.size(); d-- > 1;) strides[d - 1] = strides[d] * sizes[d];
    return at::empty({0}, options.device(device_)).set_(storage_, offset, sizes, strides);
  }
  void set(void* address) {
    if constexpr (storages_refuse) allow(*storage_.unsafeGetStorageImpl());
    storage_.unsafeGetStorageImpl()->set_data_ptr_noswap(at::DataPtr(address, device_));
  }
  void clear() {
    storage_.unsafeGetStorageImpl()->set_data_ptr_noswap(at::DataPtr(nullptr, device_));
    if constexpr (storages_refuse) refuse(*storage_.unsafeGetStorageImpl());
  }
  bool holds(at::Tensor const& tensor) const {
    return tensor.defined() && tensor.has_storage() &&
           tensor.storage().unsafeGetStorageImpl() == storage_.unsafeGetStorageImpl();
  }
  std::string const& refusal() const { return refusal_; }

 private:
  template <class S>
  static void allow(S& storage) {
    storage.clear_data_ptr_access_error_msg_();
  }
  template <class S>
  void refuse(S& storage) {
    storage.release_data_and_set_meta_custom_data_ptr_error_msg_(refusal_);
  }

  at::Device device_;
  std::string refusal_;
  c10::Storage storage_;
};

/// [Note: Refusals before torch 2.2] Storages of older versions cannot refuse: a kernel would read a null pointer.
/// There, a tensor that must not be accessed is given no storage, and a dispatch key that no other tensor has. Each
/// operator that gets such a tensor comes to refuse_operator(), before autograd and before any kernel. Its storage
/// offset, which copies of it keep, is the number of a text.
class RefusedTensors {
 public:
  static constexpr auto key = c10::DispatchKey::TESTING_ONLY_GenericWrapper;

  /// @return the number of a text, until forget()
  static std::int64_t add(std::string text) {
    auto& all = texts();
    std::lock_guard const lock(all.mutex);
    all.by_number[++all.last] = std::move(text);
    return all.last;
  }
  static void forget(std::int64_t number) {
    auto& all = texts();
    std::lock_guard const lock(all.mutex);
    all.by_number.erase(number);
  }
  /// A tensor of the shape and type of `like`, without storage. Operators that get it are refused.
  static at::Tensor make(at::Tensor const& like, std::int64_t text) {
    install();
    auto refused = at::detail::make_tensor<WithoutStorage>(like.key_set().add(key), like.dtype(), like.device());
    refused.unsafeGetTensorImpl()->set_sizes_contiguous(like.sizes());
    refused.unsafeGetTensorImpl()->set_storage_offset(text);
    return refused;
  }
  /// Makes `tensor` what `data` is: with another storage and dispatch keys. Autograd does not notice.
  static void assign(at::Tensor const& tensor, at::Tensor const& data) {
    c10::impl::ExcludeDispatchKeyGuard const unrefused(key);
    tensor.set_data(data);
  }

 private:
  /// torch::save and others ask for the storage itself: that throws too, without our text.
  struct WithoutStorage : c10::TensorImpl {
    WithoutStorage(c10::DispatchKeySet keys, caffe2::TypeMeta type, at::Device device)
        : c10::TensorImpl(keys, type, device) {
      set_storage_access_should_throw();
    }
  };
  struct Texts {
    std::mutex mutex;
    std::int64_t last = 0;
    std::map<std::int64_t, std::string> by_number;
  };
  static Texts& texts() {
    static Texts all;
    return all;
  }
  static void install() {
    static auto const library = [] {
      auto made = MAKE_TORCH_LIBRARY_IMPL(_, TESTING_ONLY_GenericWrapper);
      made.fallback(torch::CppFunction::makeFromBoxedFunction<&refuse_operator>());
      return made;
    }();
  }
  [[noreturn]] static void refuse_operator(c10::OperatorHandle const& op, torch::jit::Stack* stack) {
    std::string text = "a parameter or gradient of a sharded unit that has ended was used";
    auto& all = texts();
    for (auto const& value : *stack) {
      auto const look = [&](at::Tensor const& tensor) {
        if (!tensor.defined() || !tensor.key_set().has(key)) return;
        std::lock_guard const lock(all.mutex);
        auto const found = all.by_number.find(tensor.unsafeGetTensorImpl()->storage_offset());
        if (found != all.by_number.end()) text = found->second;
      };
      if (value.isTensor()) look(value.toTensor());
      if (value.isTensorList())
        for (at::Tensor const& tensor : value.toTensorVector()) look(tensor);
    }
    fail<UsageError>("{} ({})", text, op.schema().name());
  }
};

/// @throws UsageError unless the parameter has elements that an fp32 holds, and values
inline void expect_elements(at::Tensor const& parameter, std::string_view name, int rank) {
  auto const type = parameter.scalar_type();
  FSDP_EXPECTS(type == at::kFloat || type == at::kBFloat16 || type == at::kHalf,
               "rank {}: parameter '{}' has elements of type {}; expected float, bf16 or fp16", rank, name,
               std::string_view(c10::toString(type)));
  FSDP_EXPECTS(!parameter.is_meta(), "rank {}: parameter '{}' is on the meta device, without values", rank, name);
}

/// fp32 values in row-major order, in host memory.
inline at::Tensor values_of(at::Tensor const& parameter) {
  torch::NoGradGuard const no_grad;
  return parameter.detach().to(at::kCPU, at::kFloat).contiguous().view({-1});
}

/// Hash of a parameter's values, in two lanes of 8 bytes; equal on every machine of one byte order.
inline std::uint64_t hash_of(at::Tensor const& parameter) {
  auto const values = values_of(parameter);
  auto const bytes = static_cast<std::size_t>(values.numel()) * sizeof(float);
  auto const* const data = reinterpret_cast<char const*>(values.data_ptr<float>());
  constexpr std::uint64_t odd = 0x9e3779b97f4a7c15u;
  std::uint64_t lanes[2] = {bytes, 1}, words[2];
  for (std::size_t at = 0; at < bytes; at += sizeof words) {
    words[0] = words[1] = 0;
    std::memcpy(words, data + at, bytes - at < sizeof words ? bytes - at : sizeof words);
    for (int i = 0; i < 2; ++i) lanes[i] = (((lanes[i] << 23) | (lanes[i] >> 41)) ^ words[i]) * odd;
  }
  return lanes[0] ^ (lanes[1] >> 32) ^ (lanes[1] << 32);
}

/// Values by tensor and first element: a function for Shards::set_initial_values.
class KeptValues {
 public:
  void add(std::string const& tensor, std::int64_t first, std::int64_t count, at::Tensor const& parameter) {
    auto const values = values_of(parameter);
    auto const* const from = values.data_ptr<float>() + first;
    parts_.push_back({tensor, first, std::vector<float>(from, from + count)});
  }
  void operator()(TensorInfo const& tensor, std::int64_t first, std::span<float> out) const {
    for (auto const& part : parts_) {
      if (part.tensor != tensor.name || part.first != first || part.values.size() != out.size()) continue;
      std::memcpy(out.data(), part.values.data(), out.size_bytes());
      return;
    }
    fail<UsageError>(
        "tensor '{}': this rank has not kept elements {} to {} of its initial values: tensors were added to its unit "
        "after Sharder::shard",
        tensor.name, first, first + static_cast<std::int64_t>(out.size()));
  }

 private:
  struct Part {
    std::string tensor;
    std::int64_t first;
    std::vector<float> values;
  };
  std::vector<Part> parts_;
};

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

/// Parameters of a torch module whose storages are those of one unit of an engine (frozen parameters: of the units
/// beside it). Outside uses, storages refuse accesses; `grad()` of a parameter is then such a tensor too, so that an
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
