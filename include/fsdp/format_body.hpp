// SPDX-License-Identifier: Apache-2.0
// Formats messages field by field with fmt.
#pragma once

// fmt as headers alone, unless the program links fmt's library: files then compile faster.
#if !defined(FMT_HEADER_ONLY) && !defined(FSDP_FMT_LIBRARY)
#define FMT_HEADER_ONLY 1
#endif
#if defined(__CUDACC__) && !defined(FMT_USE_CONSTEXPR)
#define FMT_USE_CONSTEXPR 1  // fmt 9 under nvcc's front end
#endif
#include <fmt/core.h>

#include <array>
#include <charconv>

#include "fsdp/algorithm.hpp"
#include "fsdp/compiled.hpp"
#include "fsdp/format_argument.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE::detail {

/// Destination of a text. Characters beyond its room are counted and dropped. Texts and plain integers are written
/// here, without allocation; fmt formats the rest.
class FormatOutput {
 public:
  explicit FormatOutput(std::span<char> out) : out_(out) {}

  [[gnu::noinline]] void add(std::string_view text) {
    auto const room = out_.size() - std::min(size_, out_.size());
    std::copy(text.data(), text.data() + std::min(room, text.size()), out_.data() + std::min(size_, out_.size()));
    size_ += text.size();
  }
  /// @param field  braces and all; `width` is read where a field within the field asks for it
  void add(std::string_view field, FormatArgument const& argument, long long width) {
    bool const plain = field == "{}";
    int const base = plain ? 10 : field == "{:x}" ? 16 : 0;
    switch (argument.kind()) {
      case FormatArgument::Kind::text: return plain ? add(argument.text()) : format(field, argument.text(), width);
      case FormatArgument::Kind::character: return format(field, argument.character(), width);
      case FormatArgument::Kind::whole: return add(field, argument.whole(), width, base);
      case FormatArgument::Kind::natural: return add(field, argument.natural(), width, base);
      case FormatArgument::Kind::single_precision: return format(field, argument.single(), width);
      case FormatArgument::Kind::double_precision: return format(field, argument.real(), width);
      case FormatArgument::Kind::truth: return format(field, argument.truth(), width);
    }
  }
  /// Length of the whole text, also of characters that were dropped.
  std::size_t size() const { return size_; }

 private:
  /// @param base  of the digits that are all the field asks for; 0: it asks for more
  template <class Integer>
  void add(std::string_view field, Integer value, long long width, int base) {
    if (base == 0) return format(field, value, width);
    std::array<char, 24> digits;
    auto const* const end = std::to_chars(digits.data(), digits.data() + digits.size(), value, base).ptr;
    add(std::string_view(digits.data(), static_cast<std::size_t>(end - digits.data())));
  }
  template <class Value>
  void format(std::string_view field, Value value, long long width) {
    add(fmt::vformat(fmt::string_view(field.data(), field.size()), fmt::make_format_args(value, width)));
  }

  std::span<char> out_;
  std::size_t size_ = 0;
};

/// The end of the field that begins at `begin`: behind its closing brace.
inline std::size_t end_of_field(std::string_view text, std::size_t begin) {
  auto const inner = text.find_first_of("{}", begin + 1);
  return text.find('}', text[inner] == '{' ? text.find('}', inner) + 1 : inner) + 1;
}

FSDP_BODY std::size_t format_arguments_to(std::span<char> out, std::string_view text, FormatArgument const* arguments) {
  FormatOutput output(out);
  for (std::size_t at = 0; at < text.size();) {
    auto const words = text.substr(at, text.find_first_of("{}", at) - at);
    output.add(words);
    at += words.size();
    if (at == text.size()) break;
    if (text[at + 1] == text[at]) {
      output.add(text.substr(at, 1));
      at += 2;
      continue;
    }
    auto const field = text.substr(at, end_of_field(text, at) - at);
    auto const& argument = *arguments++;
    output.add(field, argument, field.rfind('{') == 0 ? 0 : (arguments++)->whole());
    at += field.size();
  }
  return output.size();
}

FSDP_BODY std::string format_arguments(std::string_view text, FormatArgument const* arguments) {
  std::array<char, 256> start;
  auto const size = format_arguments_to(start, text, arguments);
  if (size <= start.size()) return {start.data(), size};
  std::string whole(size, '\0');
  format_arguments_to(whole, text, arguments);
  return whole;
}

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE::detail
