// SPDX-License-Identifier: Apache-2.0
// Buffers of modules in checkpoints.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "fsdp/checkpoint/json.hpp"
#include "fsdp/engine/module_buffers.hpp"
#include "fsdp/error.hpp"
#include "fsdp/layout.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE {

namespace detail {

inline std::string hexadecimal(std::vector<std::byte> const& bytes) {
  constexpr char const* digits = "0123456789abcdef";
  std::string text;
  text.reserve(2 * bytes.size());
  for (auto const byte : bytes) {
    text += digits[std::to_integer<unsigned>(byte) >> 4];
    text += digits[std::to_integer<unsigned>(byte) & 15];
  }
  return text;
}
inline int digit(char c) { return c >= '0' && c <= '9' ? c - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1; }
/// @return false if `text` has another length, or is no hexadecimal number
inline bool parse_hexadecimal(std::string_view text, std::vector<std::byte>& out) {
  if (text.size() != 2 * out.size()) return false;
  for (std::size_t i = 0; i < out.size(); ++i) {
    auto const high = digit(text[2 * i]), low = digit(text[2 * i + 1]);
    if (high < 0 || low < 0) return false;
    out[i] = static_cast<std::byte>(high * 16 + low);
  }
  return true;
}

}  // namespace detail

/// Buffers as JSON, with every bit: `fsdp::save(engine, adamw, folder, {{"buffers", buffers_to_json(engine,
/// buffers)}})`. A checkpoint keeps rank 0's, once; call average_buffers or broadcast_buffers first.
/// @throws UsageError if two buffers have one name, or one has no memory
/// @note Stream: behind compute. The calling thread waits for the values.
/// @note Collective: no.
template <class E>
[[gnu::cold]] checkpoint::Json buffers_to_json(E& engine, std::vector<ModuleBuffer> const& buffers) {
  auto const turn = engine.shards().enter("buffers_to_json");
  detail::expect_buffers(engine.rank(), "buffers_to_json", buffers);
  auto all = checkpoint::Json::object();
  for (auto const& buffer : buffers) {
    std::vector<std::byte> values(buffer.bytes);
    engine.device().copy_async(engine.compute(), values.data(), buffer.data, buffer.bytes);
    engine.device().synchronize(engine.compute());
    all[buffer.name] = {{"type", buffer.type}, {"shape", buffer.shape}, {"bytes", detail::hexadecimal(values)}};
  }
  return all;
}

/// Sets buffers to what buffers_to_json() returned, on any number of ranks:
/// `buffers_from_json(engine, buffers, loaded.extra.at("buffers"))`.
/// @throws ConfigError if a buffer is missing, or has another type or shape: no buffer has changed then
/// @note Stream: behind compute. The calling thread waits until the values are there.
/// @note Collective: no; all ranks call it.
template <class E>
[[gnu::cold]] void buffers_from_json(E& engine, std::vector<ModuleBuffer> const& buffers,
                                     checkpoint::Json const& saved) {
  auto const turn = engine.shards().enter("buffers_from_json");
  detail::expect_buffers(engine.rank(), "buffers_from_json", buffers);
  std::vector<std::vector<std::byte>> all;
  for (auto const& buffer : buffers) {
    if (!saved.is_object() || !saved.contains(buffer.name))
      fail<ConfigError>("rank {}: the saved buffers have no buffer '{}', which the modules have", engine.rank(),
                        buffer.name);
    auto const& entry = saved.at(buffer.name);
    auto const has = [&](char const* key, checkpoint::Json const& value) {
      return entry.is_object() && entry.contains(key) && entry.at(key) == value;
    };
    auto const text_at = [&](char const* key) {
      return entry.is_object() && entry.contains(key) ? entry.at(key).dump() : std::string("none");
    };
    auto& values = all.emplace_back(buffer.bytes);
    if (!has("type", buffer.type) || !has("shape", buffer.shape) || !entry.contains("bytes") ||
        !entry.at("bytes").is_string() || !detail::parse_hexadecimal(entry.at("bytes").get<std::string>(), values))
      fail<ConfigError>(
          "rank {}: saved buffer '{}': expected type {}, shape ({}) and {} bytes as hexadecimal digits, got type {}, "
          "shape {}",
          engine.rank(), buffer.name, buffer.type, listed(buffer.shape), buffer.bytes, text_at("type"),
          text_at("shape"));
  }
  for (std::size_t i = 0; i < buffers.size(); ++i)
    engine.device().copy_async(engine.compute(), buffers[i].data, all[i].data(), all[i].size());
  engine.device().synchronize(engine.compute());
}

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE
