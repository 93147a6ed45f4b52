// SPDX-License-Identifier: Apache-2.0
// The input of tokenization: one text or a folder of documents, read in pieces.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "transformer/data/dataset.hpp"
#include "transformer/data/input_file.hpp"

namespace transformer {

/// A part of a file that is read in pieces.
struct Section {
  enum class Kind : unsigned char {
    text,      ///< a part of one text
    document,  ///< a file that is one document
    lines      ///< a file of JSON objects, one a line, each a document
  };
  std::filesystem::path path;
  std::string name;  ///< of the file, for messages
  Kind kind = Kind::text;
  std::uint64_t first = 0, last = 0;  ///< bytes of the file
  Split split = Split::train;         ///< of its tokens, unless a DocumentSplit says which documents are for validation
};

/// Some bytes of a section.
struct Piece {
  std::string bytes;
  Section const* section = nullptr;
  std::uint64_t offset = 0;         ///< of the first byte, in the file
  std::int64_t first_document = 0;  ///< number of the document that it begins or goes on with
  std::int64_t first_line = 1;
  bool ends_document = false;  ///< the last of a document
};

/// The input of tokenization, in sections.
struct Corpus {
  std::vector<Section> sections;
  std::int64_t ignored = 0;             ///< files of the folder with other endings, hidden ones apart
  std::filesystem::path first_ignored;  ///< the first of them, by name

  bool has_documents() const;
};

/// `path` as sections: a folder's files of documents, by name, or one file (see form_of_file).
/// @throws fsdp::ConfigError if there is nothing of the kind, or a file holds anything but text
Corpus find_corpus(std::filesystem::path const& path);
/// The text of a pipe as sections.
/// @param name  what messages call it
Corpus corpus_of_stream(StreamCopy const& copy, std::string const& name);

std::uint64_t bytes_of(std::vector<Section> const& sections);

/// Calls `use(line, number of the line in these)` for each line that holds more than blanks.
void each_line(std::string_view lines, std::function<void(std::string_view, std::int64_t)> const& use);

/// Reads sections one after the other, in pieces of about `piece_bytes` that end where `cut` allows: longer ones only
/// where no cut is (a document without blanks, a long line).
class CorpusReader {
 public:
  /// The last place at which a text that goes on may be cut; 0 if there is none.
  using Cut = std::function<std::size_t(std::string_view)>;

  /// @param sections  outlive the reader and its pieces
  CorpusReader(std::vector<Section> const& sections, std::size_t piece_bytes, Cut cut)
      : sections_(sections), piece_bytes_(piece_bytes), cut_(std::move(cut)) {}

  /// @return false if there is no more
  /// @throws fsdp::ConfigError if a file cannot be read, or has become shorter
  bool next(Piece& piece);

 private:
  void open();
  void read(std::size_t bytes);
  std::size_t place_of_cut(Section::Kind kind) const;

  std::vector<Section> const& sections_;
  std::size_t piece_bytes_;
  Cut cut_;

  std::size_t section_ = 0;
  std::ifstream stream_;
  bool open_ = false;
  std::uint64_t offset_ = 0, left_ = 0;  ///< in the section: where `ahead_` begins, and bytes not read yet
  std::string ahead_;                    ///< read, but of no piece yet
  std::int64_t document_ = 0, line_ = 1;
};

/// Which documents are for validation: `fraction` of them, to within one, at places drawn from all over. Of the
/// documents for which floor(number * fraction) is the same one is drawn, so a document's split depends on its number
/// alone.
class DocumentSplit {
 public:
  /// @pre 0 < fraction < 1
  explicit DocumentSplit(double fraction) : fraction_(fraction) {}
  Split of(std::int64_t document) const;

 private:
  std::int64_t stratum(std::int64_t document) const;
  std::int64_t begin_of(std::int64_t stratum) const;
  double fraction_;
};

}  // namespace transformer
