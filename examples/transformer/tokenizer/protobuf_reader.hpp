// SPDX-License-Identifier: Apache-2.0
// Reads protobuf's wire format (protobuf.dev, "Encoding") of an untrusted message.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "fsdp/error.hpp"

namespace transformer {

/// The fields of a message, one after the other:
///     for (ProtobufReader message(bytes, "'file'"); message.next();) switch (message.number()) ...
class ProtobufReader {
 public:
  /// @param what  the message is, for error messages: "'tokenizer.model'"
  ProtobufReader(std::string_view message, std::string_view what) : left_(message), what_(what) {}

  /// Goes to the next field. @return false at the end
  /// @throws fsdp::ConfigError if the message is cut or damaged
  bool next() {
    if (left_.empty()) return false;
    auto const key = varint();
    type_ = static_cast<Type>(key & 7u);
    if (key >> 3u == 0 || key >> 3u > most_number) wrong("a field number from 1 to 536870911", "another");
    number_ = static_cast<std::uint32_t>(key >> 3u);
    switch (type_) {
      case Type::varint: value_ = varint(); return true;
      case Type::fixed64: bytes_ = take(8); return true;
      case Type::bytes: bytes_ = take(varint()); return true;
      case Type::fixed32: bytes_ = take(4); return true;
    }
    wrong("a field of wire type 0, 1, 2 or 5", "another");
  }

  std::uint32_t number() const { return number_; }
  /// The value of the field: a whole number or an enum.
  std::uint64_t whole() const {
    expect(Type::varint, "a whole number");
    return value_;
  }
  bool flag() const { return whole() != 0; }
  float number32() const {
    expect(Type::fixed32, "a float");
    std::uint32_t bits = 0;
    for (std::size_t i = 4; i-- > 0;) bits = bits << 8u | static_cast<unsigned char>(bytes_[i]);
    return std::bit_cast<float>(bits);
  }
  /// A text, bytes or an embedded message.
  std::string_view bytes() const {
    expect(Type::bytes, "a text or a message");
    return bytes_;
  }

 private:
  enum class Type : std::uint8_t { varint = 0, fixed64 = 1, bytes = 2, fixed32 = 5 };
  static constexpr std::uint64_t most_number = (1u << 29u) - 1;

  std::uint64_t varint() {
    std::uint64_t value = 0;
    for (unsigned shift = 0; shift < 64; shift += 7) {
      auto const byte = static_cast<unsigned char>(take(1)[0]);
      value |= std::uint64_t{byte & 0x7fu} << shift;
      if (byte < 0x80) return value;
    }
    wrong("a number of at most 10 bytes", "a longer one");
  }
  std::string_view take(std::uint64_t count) {
    if (count > left_.size()) wrong(fsdp::formatted("{} more bytes", count), fsdp::formatted("{}", left_.size()));
    auto const taken = left_.substr(0, static_cast<std::size_t>(count));
    left_.remove_prefix(taken.size());
    return taken;
  }
  void expect(Type type, std::string_view expected) const {
    if (type_ != type) wrong(expected, fsdp::formatted("wire type {}", static_cast<int>(type_)));
  }
  [[noreturn]] void wrong(std::string_view expected, std::string_view got) const {
    fsdp::fail<fsdp::ConfigError>(
        "{}, protobuf field {}: expected {}, got {}; the file is cut, damaged, or of another "
        "kind",
        what_, number_, expected, got);
  }

  std::string_view left_, what_;
  std::uint32_t number_ = 0;
  Type type_ = Type::varint;
  std::uint64_t value_ = 0;
  std::string_view bytes_;
};

}  // namespace transformer
