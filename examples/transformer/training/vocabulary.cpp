// SPDX-License-Identifier: Apache-2.0
#include "transformer/training/vocabulary.hpp"

#include <fmt/format.h>

#include <span>

#include "fsdp/checkpoint.hpp"
#include "fsdp/error.hpp"
#include "fsdp/files.hpp"
#include "transformer/training/folder.hpp"

namespace transformer {

namespace fs = std::filesystem;

void save_vocabulary(fs::path const& folder, Meta const& meta) {
  if (meta.path.empty()) {
    fs::remove(folder / meta_name);  // of a run on other data
    return;
  }
  auto const copy = [&](fs::path const& from, fs::path const& name) {
    MappedFile const file(from);
    fsdp::checkpoint::replace_text_file(folder / name,
                                        {reinterpret_cast<char const*>(file.bytes().data()), file.bytes().size()});
  };
  for (auto const& name : meta.tokenizer_files) copy(meta.path.parent_path() / name, name);
  if (meta.json.empty()) return copy(meta.path, meta_name);
  fsdp::checkpoint::replace_text_file(folder / meta_name, meta.json);
}

Meta read_vocabulary(fs::path const& path, std::int64_t vocab_size, fs::path const& model) {
  auto meta = read_meta(path);
  if (meta.vocab_size > vocab_size)
    fsdp::fail<fsdp::ConfigError>("'{}' has a vocabulary of {}, but the model in '{}' has a vocabulary of {}",
                                  path.string(), meta.vocab_size, model.string(), vocab_size);
  return meta;
}

std::string vocabulary_checksum(Tokenizer const& tokenizer) {
  std::string tokens;
  for (std::int64_t id = 0; id < tokenizer.size(); ++id) {
    auto const token = tokenizer.decode(std::span(&id, 1));
    tokens += fmt::format("{} ", token.size()) + token;
  }
  return fsdp::checkpoint::checksum_text(fsdp::checkpoint::checksum_of(tokens));
}

std::string vocabulary_checksum(Meta const& meta) {
  auto const tokenizer = open_tokenizer(meta);
  return tokenizer == nullptr ? std::string() : vocabulary_checksum(*tokenizer);
}

}  // namespace transformer
