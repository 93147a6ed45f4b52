// SPDX-License-Identifier: Apache-2.0
// Any bytes as encoder.json, as changes to a good one, or as vocab.bpe: refused by name, or a tokenizer that decodes
// what it encodes.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <string_view>

#include "fsdp/error.hpp"
#include "tests/fuzz/targets/changed.hpp"
#include "tests/support/byte_pair_files.hpp"
#include "transformer/tokenizer/byte_pair.hpp"

extern "C" int LLVMFuzzerTestOneInput(std::uint8_t const* data, std::size_t size) {
  static auto const pairs = fsdp::testing::BytePairs::random(1, 20, "ab \xe4");
  static auto const encoder = pairs.encoder_json();
  static auto const merges = pairs.vocab_bpe();
  if (size == 0) return 0;
  std::string_view const rest(reinterpret_cast<char const*>(data) + 1, size - 1);
  auto const kind = data[0] % 4;
  auto const json = kind == 0 ? std::string(rest) : kind == 1 ? fsdp::testing::changed(encoder, rest) : encoder;
  auto const lines = kind == 2 ? std::string(rest) : kind == 3 ? fsdp::testing::changed(merges, rest) : merges;
  try {
    transformer::BytePair const tokenizer({json, lines});
    for (auto const text : {rest, std::string_view(lines)})
      if (tokenizer.decode(tokenizer.encode(text)) != text) std::abort();
  } catch (fsdp::ConfigError const&) {
  }
  return 0;
}
