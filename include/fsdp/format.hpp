// SPDX-License-Identifier: Apache-2.0
// Texts of messages: fmt's replacement fields, behind two functions whose bodies are compiled once.
//
// fmt's own functions are templates over all types of a call, and a file that includes the engine has a hundred calls.
// Here arguments become values of one type first. Fields are checked against the arguments when they are compiled.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>

#include "fsdp/compiled.hpp"
#include "fsdp/format_argument.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE {

namespace detail {

/// Kind of an argument: a field's specification must fit it.
enum class FormatKind : unsigned char { text, whole, real, plain };  // plain: no type may be asked for

/// The kinds of up to 32 arguments, two bits each.
using FormatKinds = std::uint64_t;

template <class T>
constexpr FormatKind format_kind() {
  if constexpr (std::is_same_v<T, bool> || std::is_same_v<T, char>)
    return FormatKind::plain;
  else if constexpr (std::is_floating_point_v<T>)
    return FormatKind::real;
  else if constexpr (std::is_integral_v<T>)
    return FormatKind::whole;
  else
    return FormatKind::text;
}
template <class... T>
constexpr FormatKinds format_kinds() {
  static_assert(sizeof...(T) <= 32, "a message has at most 32 arguments");
  FormatKinds kinds = 0;
  unsigned shift = 0;
  ((kinds |= static_cast<FormatKinds>(format_kind<T>()) << shift, shift += 2), ...);
  return kinds;
}

// Not constant expressions: where a text and its arguments do not fit, the compiler's error names one of them.
void format_text_has_a_stray_brace();
void format_fields_are_not_numbered_or_named();
void format_text_and_arguments_differ_in_number();
void format_field_does_not_suit_its_argument();

/// A specification behind its colon: [[fill]align][0][width][.precision][type], where the width may be a field, {}.
struct FormatSpecification {
  bool width_is_field = false;
  bool precision = false;
  char type = 0;      ///< 0: none
  std::size_t end{};  ///< end of the specification in the text, where a brace should close it
};
constexpr FormatSpecification read_specification(std::string_view text, std::size_t at) {
  FormatSpecification read;
  auto const next = [&](std::size_t ahead = 0) { return at + ahead < text.size() ? text[at + ahead] : char{}; };
  auto const is_align = [](char c) { return c == '<' || c == '>' || c == '^'; };
  auto const digits = [&] {
    while (next() >= '0' && next() <= '9') ++at;
  };
  if (next() != '{' && is_align(next(1)))
    at += 2;
  else if (is_align(next()))
    ++at;
  digits();
  if (next() == '{' && next(1) == '}') {
    read.width_is_field = true;
    at += 2;
  }
  if (next() == '.') {
    read.precision = true;
    ++at;
    digits();
  }
  if (next() != '}' && next() != 0) read.type = text[at++];
  read.end = at;
  return read;
}
constexpr bool suits(FormatSpecification const& specification, FormatKind kind) {
  std::string_view types = "s";
  if (kind == FormatKind::whole) types = "dxX";
  if (kind == FormatKind::real) types = "efg";
  if (kind == FormatKind::plain) types = "";
  if (specification.precision && kind != FormatKind::real) return false;
  return specification.type == 0 || types.find(specification.type) != types.npos;
}

/// Checks the fields of `text`, {} or {:specification}, against `count` arguments.
constexpr void check_format(std::string_view text, std::size_t count, FormatKinds kinds) {
  std::size_t taken = 0;
  auto const take = [&] { return static_cast<FormatKind>(taken < 32 ? kinds >> (2 * taken++) & 3 : 0); };
  auto const* const begin = text.data();  // compilers take longer to evaluate calls than pointers
  auto const size = text.size();
  for (std::size_t at = 0; at < size; ++at) {
    if (begin[at] != '{' && begin[at] != '}') continue;
    if (at + 1 < text.size() && text[at + 1] == text[at]) {
      ++at;
      continue;
    }
    if (text[at] == '}' || at + 1 == text.size()) format_text_has_a_stray_brace();
    auto const kind = take();
    if (text[++at] == '}') continue;
    if (text[at] != ':') format_fields_are_not_numbered_or_named();
    auto const specification = read_specification(text, at + 1);
    at = specification.end;
    if (specification.width_is_field && take() != FormatKind::whole) format_field_does_not_suit_its_argument();
    if (at >= text.size() || text[at] != '}' || !suits(specification, kind)) format_field_does_not_suit_its_argument();
  }
  if (taken != count) format_text_and_arguments_differ_in_number();
}

/// The text of a message, checked against the arguments of its call.
template <std::size_t count, FormatKinds kinds>
class FormatText {
 public:
  consteval FormatText(char const* text) : text_(text) { check_format(text_, count, kinds); }
  std::string_view view() const { return text_; }

 private:
  std::string_view text_;
};
template <class... Args>
using FormatTextOf = std::type_identity_t<FormatText<sizeof...(Args), format_kinds<Args...>()>>;

}  // namespace detail

/// `text` with its fields replaced by the arguments in order, as fmt would do it. A field is {} or {:specification},
/// [[fill]align][0][width][.precision][type] with a type of d, x, X (whole numbers), e, f, g (real ones), s (texts);
/// the width may be a field.
template <class... Args>
std::string formatted(detail::FormatTextOf<Args...> text, Args const&... args) {
  FormatArgument const arguments[]{args..., 0};
  return detail::format_arguments(text.view(), arguments);
}

/// Formats into `out` without allocation, and cuts the text to the room. @return what was written there
template <class... Args>
std::string_view formatted_to(std::span<char> out, detail::FormatTextOf<Args...> text, Args const&... args) {
  FormatArgument const arguments[]{args..., 0};
  auto const size = detail::format_arguments_to(out, text.view(), arguments);
  return {out.data(), size < out.size() ? size : out.size()};
}

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE

#if !FSDP_COMPILED
#include "fsdp/format_body.hpp"
#endif
