// SPDX-License-Identifier: Apache-2.0
// A reader of Python's pickles that hold numbers, strings and dictionaries of them, such as nanoGPT's meta.pkl.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

namespace transformer {

/// A value of a pickle.
struct PickleValue {
  enum class Kind : unsigned char { number, text, dictionary };
  Kind kind = Kind::number;
  std::int64_t number = 0;
  std::string_view text{};           ///< UTF-8; lies in the pickle's bytes
  std::vector<PickleValue> items{};  ///< of a dictionary: key, value, key, value and so on
  int depth = 0;                     ///< of dictionaries: 0 for a number or a string

  /// The value of a dictionary's key; null if there is none.
  PickleValue const* find(std::string_view key) const;
};

/// Reads the dictionary that a pickle holds. A pickle is a program that can call any function of Python: this reader
/// knows the instructions that build numbers, strings and dictionaries, of protocols 1 to 5, and refuses all others.
/// Python's Lib/pickletools.py describes them.
/// @param bytes  outlive the result
/// @param what   they are, for messages: "'path'"
/// @throws fsdp::ConfigError naming the byte and what is wrong with it
PickleValue read_pickle(std::string_view bytes, std::string_view what);

}  // namespace transformer
