// SPDX-License-Identifier: Apache-2.0
// Tokenizes texts into token files.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <vector>

#include "transformer/tokenizer/tokenizer.hpp"

namespace transformer {

/// Input, output and tokenizer of `prepare`.
struct PrepareOptions {
  std::filesystem::path data;    ///< a text, lines of JSON, a folder of such files, or a pipe ("-": stdin)
  std::filesystem::path folder;  ///< where train.bin, val.bin and meta.json go
  /// GPT-2's files; both empty: the tokens are characters, or those of `tokenizer`
  std::filesystem::path encoder_json{}, vocab_bpe{};
  /// The tokenizer of a model's folder: see open_tokenizer_folder. Null: none. Documents become rows: see [Note:
  /// Documents as rows].
  std::shared_ptr<Tokenizer const> tokenizer{};
  std::vector<std::filesystem::path> tokenizer_files{};  ///< its files, which are copied
  bool ends_rows = false;  ///< the end-of-text token ends each row, if the tokenizer's template does not end so
  std::filesystem::path val_data{};  ///< what is for validation, in the ways of `data`; empty: a part of `data`
  double val_fraction = 0.1;  ///< that part: of a text's characters, its end; of documents. 0: there is no val.bin
  int threads = 1;
  std::size_t piece_bytes = std::size_t{1} << 20;  ///< that a thread takes at a time
  /// Told how many bytes of how many are done, over all passes.
  std::function<void(std::uint64_t done, std::uint64_t total)> progress{};
};

/// Counts of a prepared data set.
struct PreparedData {
  std::int64_t characters = 0, vocab_size = 0, train_tokens = 0, val_tokens = 0;
  std::int64_t documents = 0;  ///< 0: one text
  std::int64_t empty = 0;      ///< further documents, without text or of a single token, which became no rows
  bool has_rows = false;       ///< the documents are rows
  bool has_val = true;         ///< val.bin was written
  std::int64_t ignored = 0;    ///< files of folders with other endings than documents have
  std::filesystem::path first_ignored;
};

/// Writes train.bin, val.bin, meta.json and, for GPT-2's tokens, copies of its files into `folder`, each under a
/// temporary name first, and on the disk before it has its own. Without validation data an old val.bin is removed. Two
/// processes cannot write to one folder; a data set that a killed process has half replaced is not opened. uint16 ids,
/// uint32 for a vocabulary above 65,535. A text is cut once, after floor((1 - val_fraction) n) of its n characters, as
/// nanoGPT does; each document goes to one of both files whole (see DocumentSplit), and the end-of-text id after it.
/// With `tokenizer` each document is a row instead: the document's tokens in the tokenizer's template; train.rows and
/// val.rows say where rows end. Markers of special tokens in a text are those tokens.
/// The tokens do not depend on threads and piece_bytes; memory is in proportion to both, and to the longest word of a
/// text or the longest line of a .jsonl file if these are longer than a piece.
/// @throws fsdp::ConfigError if there is no text, characters are to be tokens and a text is not UTF-8, a line is no
/// JSON
///         object with a "text", no document is for validation, the files of GPT-2 are not what they should be, or
///         `folder` cannot be written
PreparedData prepare_data(PrepareOptions const& options);

}  // namespace transformer
