// SPDX-License-Identifier: Apache-2.0
// Any bytes, and good pickles with changes, as nanoGPT's meta.pkl: refused by name, or a vocabulary that the meta.json
// of a model's folder has too.
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <span>
#include <string>

#include "fsdp/error.hpp"
#include "tests/fuzz/targets/changed.hpp"
#include "tests/support/pickles.hpp"
#include "transformer/data/dataset.hpp"
#include "transformer/data/pickle.hpp"

namespace meta_pickle {

std::filesystem::path written(std::string const& bytes) {
  static auto const path = std::filesystem::path("/dev/shm") / ("fsdp-fuzz-pickle-" + std::to_string(::getpid()));
  std::ofstream(path, std::ios::binary) << bytes;
  return path;
}

void read(std::string const& bytes) {
  try {
    auto const meta = transformer::read_pickled_meta(written(bytes));
    auto const same = transformer::read_meta(written(meta.json));
    if (same.vocab_size != meta.vocab_size || (same.characters == nullptr) != (meta.characters == nullptr))
      std::abort();
    for (std::int64_t id = 0; meta.characters != nullptr && id < meta.vocab_size; ++id)
      if (same.characters->decode(std::span(&id, 1)) != meta.characters->decode(std::span(&id, 1))) std::abort();
  } catch (fsdp::ConfigError const&) {
  }
  std::filesystem::remove(written(""));
}

}  // namespace meta_pickle

extern "C" int LLVMFuzzerTestOneInput(std::uint8_t const* data, std::size_t size) {
  static auto const good = fsdp::testing::meta_pickles();
  if (size == 0) return 0;
  std::string const rest(reinterpret_cast<char const*>(data) + 1, size - 1);
  auto const choice = data[0] % (good.size() + 1);
  meta_pickle::read(choice == good.size() ? rest : fsdp::testing::changed(good[choice], rest));
  return 0;
}
