// SPDX-License-Identifier: Apache-2.0
// Buffers of sharded torch modules (running means of a BatchNorm) in checkpoints. No part of fsdp/libtorch.hpp.
#pragma once

#include <torch/torch.h>

#include <cstddef>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "fsdp/checkpoint/json.hpp"
#include "fsdp/error.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE::libtorch {

namespace detail {

/// Full names and tensors, in the order of the units.
template <class Sharder>
std::vector<std::pair<std::string, at::Tensor>> named_buffers(Sharder const& sharder) {
  std::vector<std::pair<std::string, at::Tensor>> all;
  for (auto const& [unit, module] : sharder.modules())
    for (auto const& item : module->named_buffers())
      if (item.value().defined()) all.emplace_back(unit.empty() ? item.key() : unit + "." + item.key(), item.value());
  return all;
}
inline std::string hexadecimal(std::string_view bytes) {
  constexpr char const* digits = "0123456789abcdef";
  std::string text;
  text.reserve(2 * bytes.size());
  for (char const byte : bytes) {
    auto const bits = static_cast<unsigned char>(byte);
    text += digits[bits >> 4];
    text += digits[bits & 15];
  }
  return text;
}
inline int digit(char c) { return c >= '0' && c <= '9' ? c - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1; }
/// @return false if `text` has another length, or is no hexadecimal number
inline bool parse_hexadecimal(std::string_view text, std::size_t bytes, char* out) {
  if (text.size() != 2 * bytes) return false;
  for (std::size_t i = 0; i < bytes; ++i) {
    auto const high = digit(text[2 * i]), low = digit(text[2 * i + 1]);
    if (high < 0 || low < 0) return false;
    out[i] = static_cast<char>(high * 16 + low);
  }
  return true;
}

}  // namespace detail

/// The buffers of a Sharder's modules: their names, types, shapes and bytes. Ranks have different ones; a checkpoint
/// keeps those of rank 0, as PyTorch's DDP does: `fsdp::save(engine, adamw, folder, {{"buffers", buffers(sharder)}})`.
/// @tparam Sharder  fsdp::libtorch::Sharder
template <class Sharder>
checkpoint::Json buffers(Sharder const& sharder) {
  checkpoint::Json all = checkpoint::Json::object();
  for (auto const& [name, tensor] : detail::named_buffers(sharder)) {
    auto const values = tensor.detach().to(at::kCPU).contiguous();
    auto const* const data = static_cast<char const*>(values.data_ptr());
    all[name] = {{"type", c10::toString(values.scalar_type())},
                 {"shape", values.sizes().vec()},
                 {"bytes", detail::hexadecimal({data, values.nbytes()})}};
  }
  return all;
}

/// Sets the buffers of a Sharder's modules to what buffers() returned: `load_buffers(sharder,
/// loaded.extra["buffers"])`.
/// @throws ConfigError if a buffer is missing, or has another type or shape: no buffer has changed then
template <class Sharder>
void load_buffers(Sharder const& sharder, checkpoint::Json const& saved) {
  torch::NoGradGuard const no_grad;
  std::vector<std::pair<at::Tensor, at::Tensor>> changes;
  for (auto const& [name, tensor] : detail::named_buffers(sharder)) {
    if (!saved.is_object() || !saved.contains(name))
      fail<ConfigError>("the saved buffers have no buffer '{}', which the modules have", name);
    auto const& entry = saved.at(name);
    auto values = at::empty(tensor.sizes(), at::TensorOptions().dtype(tensor.scalar_type()));
    bool const fits = entry.is_object() && entry.value("type", std::string()) == c10::toString(tensor.scalar_type()) &&
                      entry.value("shape", std::vector<std::int64_t>{-1}) == tensor.sizes().vec() &&
                      detail::parse_hexadecimal(entry.value("bytes", std::string()), values.nbytes(),
                                                static_cast<char*>(values.data_ptr()));
    if (!fits)
      fail<ConfigError>("the saved buffer '{}' is not what the modules have: {} ({}) with as many bytes", name,
                        std::string_view(c10::toString(tensor.scalar_type())), listed(tensor.sizes().vec()));
    changes.emplace_back(tensor, std::move(values));
  }
  for (auto& [tensor, values] : changes) tensor.copy_(values);
}

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE::libtorch
