// SPDX-License-Identifier: Apache-2.0
// nanogpt prepare: a text file becomes token files and a vocabulary.
#include <fmt/format.h>

#include <cstdio>

#include "commands.hpp"
#include "data.hpp"
#include "fsdp/error.hpp"
#include "metrics.hpp"

namespace nanogpt {

int run_prepare(Settings const& settings) {
  check_together(settings, Command::prepare, 1);
  auto const folder = std::filesystem::path("data") / settings.dataset;
  auto const prepared = prepare_text(settings.data, folder);
  fmt::print("length of dataset in characters: {}\n", with_commas(prepared.characters));
  fmt::print("vocab size: {}\n", with_commas(prepared.vocab_size));
  fmt::print("train has {} tokens\n", with_commas(prepared.train_tokens));
  fmt::print("val has {} tokens\n", with_commas(prepared.val_tokens));
  fmt::print("wrote train.bin, val.bin and meta.json to {}\n", folder.string());
  return 0;
}

}  // namespace nanogpt
