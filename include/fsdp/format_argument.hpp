// SPDX-License-Identifier: Apache-2.0
// An argument of a message: one type for all kinds, see format.hpp.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <string_view>

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

}  // namespace detail
}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE
