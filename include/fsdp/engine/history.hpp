// SPDX-License-Identifier: Apache-2.0
// Hash of optimizer steps, discards and imports of a rank, attached to each collective so that diverged ranks are
// found.
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "fsdp/concepts.hpp"
#include "fsdp/format.hpp"
#include "fsdp/init.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE::detail {

/// Records optimizer steps with their learning rates, discarded gradients, imports, and micro-steps that do not reduce.
/// Ranks that differ in them would train on with different weights. Collectives carry the last event and a hash of all;
/// communicators that compare labels throw an OrderError.
class History {
 public:
  /// @param what  a literal that ends with the name of the value
  void add(std::string_view what, float value) {
    note(what, std::bit_cast<std::uint32_t>(value), Value::real);
    real_ = value;
  }
  void add(std::string_view what, std::int64_t value) {
    note(what, static_cast<std::uint64_t>(value), Value::whole);
    whole_ = value;
  }
  /// Records an event without a number.
  void add(std::string_view what) { note(what, 0, Value::none); }
  /// Counts an event that may come several times in a row. @param what  a literal that ends with the name of their
  /// number
  void count(std::string_view what) { add(what, what_ == what ? whole_ + 1 : 1); }
  /// The last event and the hash of all; "" before the first. Valid until the next add(). Made on demand.
  [[gnu::noinline]] std::string_view text() const {
    if (size_ == 0 && !what_.empty())
      size_ = (kind_ == Value::real    ? formatted_to(text_, "{} {}, history {:x}", what_, real_, hash_)
               : kind_ == Value::whole ? formatted_to(text_, "{} {}, history {:x}", what_, whole_, hash_)
                                       : formatted_to(text_, "{}, history {:x}", what_, hash_))
                  .size();
    return {text_.data(), size_};
  }
  /// The label of a collective that is enqueued now.
  Label label(std::string_view unit, std::string_view pass) const { return {unit, pass, text()}; }

 private:
  enum class Value : unsigned char { none, real, whole };

  void note(std::string_view what, std::uint64_t bits, Value kind) {
    for (auto const more : {hash_name(what), bits}) hash_ = (hash_ ^ more) * 0x9e3779b97f4a7c15u + (hash_ >> 29);
    what_ = what;
    kind_ = kind;
    size_ = 0;
  }

  std::uint64_t hash_ = 0;
  std::string_view what_;
  Value kind_ = Value::none;
  float real_ = 0;
  std::int64_t whole_ = 0;
  mutable std::array<char, 80> text_{};
  mutable std::size_t size_ = 0;
};

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE::detail
