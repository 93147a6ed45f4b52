// SPDX-License-Identifier: Apache-2.0
// Any bytes as a token file or as meta.json: refused by name, or read within their bounds.
#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <string>

#include "fsdp/error.hpp"
#include "transformer/data/dataset.hpp"

extern "C" int LLVMFuzzerTestOneInput(std::uint8_t const* data, std::size_t size) {
  static int const file = ::memfd_create("fuzz", 0);
  static auto const path = "/proc/self/fd/" + std::to_string(file);
  if (size == 0) return 0;
  auto const* const bytes = data + 1;
  auto const count = size - 1;
  if (::ftruncate(file, static_cast<off_t>(count)) != 0 ||
      ::pwrite(file, bytes, count, 0) != static_cast<ssize_t>(count))
    std::abort();
  try {
    if (data[0] % 3 == 2) {
      auto const meta = transformer::read_meta(path);
      if (meta.vocab_size < 1) std::abort();
      (void)transformer::open_tokenizer(meta);
      return 0;
    }
    transformer::TokenFile const tokens(path, data[0] % 3 == 0 ? 2 : 4);
    if (tokens.size() < 1 || static_cast<std::size_t>(tokens.size()) * 2 > count) std::abort();
    std::int64_t largest = 0;
    for (std::int64_t i = 0; i < tokens.size(); ++i) largest = std::max(largest, tokens.at(i));
    tokens.check_ids(largest + 1, 0, tokens.size());
    if (largest == 0) return 0;
    try {
      tokens.check_ids(largest, 0, tokens.size());
    } catch (fsdp::ConfigError const&) {
      return 0;
    }
    std::abort();  // the largest id lies outside that vocabulary
  } catch (fsdp::ConfigError const&) {
  }
  return 0;
}
