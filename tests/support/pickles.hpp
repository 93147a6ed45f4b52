// SPDX-License-Identifier: Apache-2.0
// Pickles as Python 3.11 writes them.
#pragma once

#include <array>
#include <string>

namespace fsdp::testing {

/// The meta.pkl of the characters "\n", "a" and "é", as nanoGPT's data/shakespeare_char/prepare.py writes it, by
/// pickle.dumps({"vocab_size": 3, "itos": {0: "\n", 1: "a", 2: "é"}, "stoi": {"\n": 0, "a": 1, "é": 2}}, protocol) with
/// the protocols 1, 2 and 4.
inline std::array<std::string, 3> meta_pickles() {
  using namespace std::string_literals;
  auto const old =
      "}q\0(X\n\0\0\0vocab_sizeq\1K\3X\4\0\0\0itosq\2}q\3(K\0X\1\0\0\0\nq\4K\1X\1\0\0\0aq\5K\2X\2\0\0\0\xc3\xa9q\6uX\4\0\0\0stoiq\7}q\x8(h\4K\0h\5K\1h\6K\2uu."s;
  return {old, "\x80\2"s + old,
          "\x80\4\x95I\0\0\0\0\0\0\0}\x94(\x8c\nvocab_size\x94K\3\x8c\4itos\x94}\x94(K\0\x8c\1\n\x94K\1\x8c\1"s +
              "a\x94K\2\x8c\2\xc3\xa9\x94u\x8c\4stoi\x94}\x94(h\4K\0h\5K\1h\6K\2uu."s};
}

}  // namespace fsdp::testing
