// SPDX-License-Identifier: Apache-2.0
// Storages of torch whose address an engine sets, and that refuse accesses, by name, while it is not set.
#pragma once

#include <ATen/ATen.h>
#include <torch/library.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "fsdp/error.hpp"

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

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE::libtorch::detail
