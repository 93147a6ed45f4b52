// SPDX-License-Identifier: Apache-2.0
// Data sets: token files and their tokenizer.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "transformer/data/row_index.hpp"
#include "transformer/data/token_file.hpp"
#include "transformer/data/token_shards.hpp"
#include "transformer/tokenizer/tokenizer.hpp"

namespace transformer {

inline constexpr std::int64_t gpt2_tokens = 50257;  ///< of GPT-2's vocabulary
/// A file of a data set's folder while `prepare` gives the new files their names.
inline constexpr std::string_view half_prepared_name = ".half-prepared";

/// The names of files that say what the tokens of a data set are: prepare's, and nanoGPT's.
inline constexpr std::string_view meta_name = "meta.json", pickled_meta_name = "meta.pkl";

/// The contents of meta.json or meta.pkl, which describe a pair of token files.
struct Meta {
  std::int64_t vocab_size = 50304;              ///< GPT-2's 50257 rounded up to 128: for token files without meta.json
  std::size_t token_bytes = 2;                  ///< 2 (uint16) or 4 (uint32)
  std::filesystem::path path;                   ///< of that file; empty without one
  std::shared_ptr<Tokenizer const> characters;  ///< null unless the tokens are characters
  std::vector<std::string> tokenizer_files;     ///< beside meta.json: of GPT-2's tokens, encoder.json and vocab.bpe
  bool tokenizer_of_model = false;              ///< they are those of a model's folder: see open_tokenizer_folder
  bool has_rows = false;                        ///< documents are rows: see [Note: Documents as rows]
  /// The equivalent meta.json, if `path` is a meta.pkl.
  std::string json{};
};

/// Reads meta.json.
/// @throws fsdp::ConfigError if the file is there but says nonsense; a missing file gives the defaults
Meta read_meta(std::filesystem::path const& path);

/// Reads nanoGPT's meta.pkl: `vocab_size`, and if the tokens are characters, `itos` and `stoi`.
/// @throws fsdp::ConfigError if the file cannot be read, or says nonsense
Meta read_pickled_meta(std::filesystem::path const& path);

/// The meta.json of tokens that are characters.
/// @param symbols  id to symbol, in UTF-8
nlohmann::json meta_of_characters(std::vector<std::string> const& symbols);

/// The tokenizer of the tokens; null if meta.json names none.
/// @throws fsdp::ConfigError if its files cannot be read, or make another vocabulary than meta.json says
std::shared_ptr<Tokenizer const> open_tokenizer(Meta const& meta);

/// A data set: both splits and what meta.json says of them.
struct Dataset {
  Meta meta;
  TokenShards train, val;

  std::optional<RowIndex> train_rows{}, val_rows{};  ///< if meta.has_rows

  TokenShards const& split(Split which) const { return which == Split::train ? train : val; }
  /// Null if the split is one text.
  RowIndex const* rows(Split which) const {
    auto const& rows = which == Split::train ? train_rows : val_rows;
    return rows ? &*rows : nullptr;
  }
};

/// Where a data set's token files are.
struct DataNames {
  std::string dataset;     ///< the folder data/`dataset`
  std::string train_data;  ///< instead of it: a file, a pattern or a folder
  std::string val_data;    ///< the same for validation; empty: the folder of the training files
};

/// Opens a data set; meta.json, or nanoGPT's meta.pkl, is looked for beside the first training file.
/// @param with_val  false: validation data are not looked for, and `val` has no files
/// @throws fsdp::ConfigError (see Meta and TokenFile)
Dataset open_dataset(DataNames const& names, bool with_val = true);

/// Purposes of random draws. Each has its own sequence of numbers.
enum class Draw : std::uint64_t { tokens = 0, train_loss = 1, val_loss = 2, window = 3 };

/// A number in [0, choices), uniform. Counter-based: it depends on the arguments alone, so that a run can be continued
/// anywhere and evaluations disturb nothing.
std::int64_t draw_offset(std::uint64_t seed, Draw draw, std::uint64_t batch, std::uint64_t sequence,
                         std::int64_t choices);

}  // namespace transformer
