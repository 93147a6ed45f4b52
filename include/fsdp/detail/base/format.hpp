// SPDX-License-Identifier: Apache-2.0
// Texts of messages: fmt's replacement fields, behind two functions whose bodies are compiled once.
//
// fmt's own functions are templates over all types of a call, and a file that includes the engine has a hundred
// calls. Here arguments become values of one type first. Fields are checked against the arguments when they are
// compiled.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>

#include "fsdp/detail/base/compiled.hpp"
#include "fsdp/version.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE {

/// An argument of a message: a text, a character, a number or a bool. It refers to a text, and lives as long as the
/// call.
class FormatArgument {
 public:
  enum class Kind : unsigned char { text, character, whole, natural, single_precision, double_precision, truth };

  FormatArgument(std::string_view value) : kind_(Kind::text), text_(value) {}
  FormatArgument(std::string const& value) : FormatArgument(std::string_view(value)) {}
  FormatArgument(char const* value) : FormatArgument(std::string_view(value == nullptr ? "(null)" : value)) {}
  FormatArgument(int value) : FormatArgument(static_cast<long long>(value)) {}
  FormatArgument(long value) : FormatArgument(static_cast<long long>(value)) {}
  FormatArgument(long long value) : kind_(Kind::whole), whole_(value) {}
  FormatArgument(unsigned value) : FormatArgument(static_cast<unsigned long long>(value)) {}
  FormatArgument(unsigned long value) : FormatArgument(static_cast<unsigned long long>(value)) {}
  FormatArgument(unsigned long long value) : kind_(Kind::natural), natural_(value) {}
  FormatArgument(float value) : kind_(Kind::single_precision), single_(value) {}
  FormatArgument(double value) : kind_(Kind::double_precision), double_(value) {}
  FormatArgument(bool value) : kind_(Kind::truth), truth_(value) {}
  FormatArgument(char value) : kind_(Kind::character), character_(value) {}
  FormatArgument(void const*) = delete;

  Kind kind() const { return kind_; }
  std::string_view text() const { return text_; }
  char character() const { return character_; }
  long long whole() const { return kind_ == Kind::natural ? static_cast<long long>(natural_) : whole_; }
  unsigned long long natural() const { return natural_; }
  float single() const { return single_; }
  double real() const { return double_; }
  bool truth() const { return truth_; }

 private:
  Kind kind_;
  union {
    std::string_view text_;
    char character_;
    long long whole_;
    unsigned long long natural_;
    float single_;
    double double_;
    bool truth_;
  };
};

namespace detail {

/// formatted() and formatted_to(); the latter returns the length of the whole text.
std::string format_arguments(std::string_view text, FormatArgument const* arguments);
std::size_t format_arguments_to(std::span<char> out, std::string_view text, FormatArgument const* arguments);

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

namespace detail {

/// Names the first item that differs in two lists of items, which ", " separates. An item is a name and a value behind
/// the last space: "learning rate differs: 0.1 on rank 0, 0.2 on rank 1". In a name, what precedes " with " and ": "
/// tells whose value it is, and is left out. Empty: no item differs in its value alone.
[[gnu::cold]] inline std::string value_that_differs(std::string_view one, int rank, std::string_view other,
                                                    int other_rank) {
  auto const next = [](std::string_view& list) {
    auto const end = std::min(list.find(", "), list.size());
    auto const item = list.substr(0, end);
    list.remove_prefix(std::min(end + 2, list.size()));
    return item;
  };
  while (!one.empty() && !other.empty()) {
    auto const ours = next(one), theirs = next(other);
    if (ours == theirs) continue;
    auto const at = ours.rfind(' ');
    if (at == std::string_view::npos || at != theirs.rfind(' ') || ours.substr(0, at) != theirs.substr(0, at)) break;
    auto name = ours.substr(0, at);
    for (std::string_view const before : {" with ", ": "})
      if (auto const found = name.rfind(before); found != std::string_view::npos)
        name.remove_prefix(found + before.size());
    auto const values = std::string(ours.substr(at)) + std::string(theirs.substr(at));
    if (name.empty() || values.find_first_of("()[]{}'\"") != std::string::npos) break;
    return formatted("{} differs: {} on rank {}, {} on rank {}", name, ours.substr(at + 1), rank, theirs.substr(at + 1),
                     other_rank);
  }
  return {};
}

}  // namespace detail

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE

#if !FSDP_COMPILED || defined(FSDP_DEFINE_BODIES)

// The bodies need fmt, which is slow to compile: it is included here, and by no file that links fsdp::compiled.
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
#endif
