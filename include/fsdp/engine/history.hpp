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

namespace fsdp::detail {

/// Records optimizer steps with their learning rates, discarded gradients, imports, and micro-steps that do not reduce.
/// Ranks that differ in them would train on with different weights. Collectives carry the last event and a hash of all;
/// communicators that compare labels throw an OrderError.
class History {
 public:
  /// @param what  a literal
  void add(std::string_view what, float value) {
    for (auto const more : {hash_name(what), std::uint64_t{std::bit_cast<std::uint32_t>(value)}})
      hash_ = (hash_ ^ more) * 0x9e3779b97f4a7c15u + (hash_ >> 29);
    what_ = what;
    value_ = value;
    has_value_ = true;
    size_ = 0;
  }
  /// The same for an event without a number.
  void add(std::string_view what) {
    add(what, 0.0f);
    has_value_ = false;
  }
  /// The last of them, and all; nothing at first. Until the next add(). Made when somebody reads it.
  [[gnu::noinline]] std::string_view text() const {
    if (size_ == 0 && !what_.empty())
      size_ = (has_value_ ? formatted_to(text_, "{} {:g}, history {:x}", what_, value_, hash_)
                          : formatted_to(text_, "{}, history {:x}", what_, hash_))
                  .size();
    return {text_.data(), size_};
  }
  /// The label of a collective that is enqueued now.
  Label label(std::string_view unit, std::string_view pass) const { return {unit, pass, text()}; }

 private:
  std::uint64_t hash_ = 0;
  std::string_view what_;
  float value_ = 0;
  bool has_value_ = false;
  mutable std::array<char, 64> text_{};
  mutable std::size_t size_ = 0;
};

}  // namespace fsdp::detail
