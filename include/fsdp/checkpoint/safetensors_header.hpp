// SPDX-License-Identifier: Apache-2.0
// The safetensors file format: the header.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "fsdp/checkpoint/json.hpp"
#include "fsdp/error.hpp"
#include "fsdp/tensor.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE::checkpoint {

/// A tensor of a file: name, element type, extents.
struct TensorEntry {
  std::string name;
  DType dtype = DType::f32;
  std::vector<std::int64_t> shape;

  std::int64_t numel() const {
    std::int64_t product = 1;
    for (auto const extent : shape) product *= extent;
    return product;
  }
};

namespace detail {

inline constexpr std::size_t length_bytes = 8;  ///< the header's length, little-endian, comes first
inline constexpr std::uint64_t longest_header = 100'000'000;

inline std::string_view format_name(DType type) {
  switch (type) {
    case DType::f32: return "F32";
    case DType::bf16: return "BF16";
    case DType::f16: return "F16";
    case DType::f64: return "F64";
    case DType::i64: return "I64";
  }
  return "?";
}

/// An element type of safetensors that is not in DType.
struct OtherType {
  std::string_view name;
  std::size_t bytes;  ///< bytes of an element
};
inline constexpr OtherType other_types[] = {{"BOOL", 1}, {"U8", 1},  {"I8", 1},  {"F8_E4M3", 1}, {"F8_E5M2", 1},
                                            {"U16", 2},  {"I16", 2}, {"U32", 4}, {"I32", 4},     {"U64", 8}};

}  // namespace detail

/// The beginning of a file: the header's length, and the header. The tensors' bytes follow end to end, from a multiple
/// of 8 bytes on.
/// @param metadata  texts for the header's "__metadata__"    @param file  its name, for messages
/// @throws UsageError if a name occurs twice
inline std::string safetensors_header(std::vector<TensorEntry> const& entries,
                                      std::map<std::string, std::string> const& metadata, std::string_view file) {
  std::string text;
  auto const add = [&](std::string const& name, Json const& value) {
    text += (text.empty() ? "{" : ",") + Json(name).dump() + ":" + value.dump();
  };
  if (!metadata.empty()) add("__metadata__", metadata);
  std::set<std::string_view> names;
  std::int64_t offset = 0;
  for (auto const& entry : entries) {
    FSDP_EXPECTS(names.insert(entry.name).second, "'{}': tensor '{}' occurs twice", file, entry.name);
    auto const end = offset + entry.numel() * static_cast<std::int64_t>(size_of(entry.dtype));
    add(entry.name,
        {{"dtype", detail::format_name(entry.dtype)}, {"shape", entry.shape}, {"data_offsets", {offset, end}}});
    offset = end;
  }
  text += text.empty() ? "{}" : "}";
  auto const length = (text.size() + 7) / 8 * 8;
  std::string bytes;
  for (std::size_t i = 0; i < detail::length_bytes; ++i) bytes += static_cast<char>(length >> (8 * i));
  bytes += text;
  bytes.resize(detail::length_bytes + length, ' ');
  return bytes;
}

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE::checkpoint
