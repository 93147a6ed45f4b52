// SPDX-License-Identifier: Apache-2.0
// The input of tokenization: one text or a folder of documents, read in pieces.
#include "transformer/data/corpus.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <system_error>
#include <utility>

#include "fsdp/error.hpp"
#include "transformer/data/window_order.hpp"

namespace transformer {
namespace {

namespace fs = std::filesystem;

[[noreturn]] void cannot(std::string const& name, std::string_view what, int error) {
  fsdp::fail<fsdp::ConfigError>("'{}' cannot be {}: {}", name, what, std::generic_category().message(error));
}

/// @param of_text  the kind of a file that is one text
Section whole_file(fs::path const& path, std::string const& name, Section::Kind of_text) {
  if (!std::ifstream(path, std::ios::binary)) cannot(name, "opened", errno);
  std::error_code error;
  auto const bytes = fs::file_size(path, error);
  if (error) cannot(name, "read", error.value());
  auto const kind = form_of_file(path, name) == TextForm::lines ? Section::Kind::lines : of_text;
  return {path, name, kind, 0, bytes, Split::train};
}

}  // namespace

bool Corpus::has_documents() const {
  return std::any_of(sections.begin(), sections.end(),
                     [](Section const& section) { return section.kind != Section::Kind::text; });
}

Corpus find_corpus(fs::path const& path) {
  using Kind = Section::Kind;
  std::error_code error;
  Corpus corpus;
  if (!fs::is_directory(path, error)) {
    corpus.sections = {whole_file(path, shown_name(path), Kind::text)};
    return corpus;
  }
  for (auto at = fs::recursive_directory_iterator(path, error); !error && at != fs::end(at); at.increment(error)) {
    if (!at->is_regular_file(error) || at->path().filename().native().front() == '.') continue;
    if (form_by_name(at->path())) {
      corpus.sections.push_back(whole_file(at->path(), at->path().string(), Kind::document));
    } else {
      if (corpus.ignored++ == 0 || at->path() < corpus.first_ignored) corpus.first_ignored = at->path();
    }
  }
  auto& sections = corpus.sections;
  if (error) cannot(path.string(), "read", error.value());
  if (sections.empty()) {
    if (corpus.ignored > 0) static_cast<void>(form_of_file(corpus.first_ignored, corpus.first_ignored.string()));
    fsdp::fail<fsdp::ConfigError>(
        "data: expected files *.txt, *.jsonl or *.ndjson in the folder '{}', got {}", path.string(),
        corpus.ignored == 0
            ? std::string("none")
            : fmt::format("{} other files, such as '{}'", corpus.ignored, corpus.first_ignored.filename().string()));
  }
  std::sort(sections.begin(), sections.end(), [](Section const& a, Section const& b) { return a.path < b.path; });
  return corpus;
}

Corpus corpus_of_stream(StreamCopy const& copy, std::string const& name) {
  Corpus corpus;
  corpus.sections = {whole_file(copy.path(), name, Section::Kind::text)};
  return corpus;
}

std::uint64_t bytes_of(std::vector<Section> const& sections) {
  std::uint64_t bytes = 0;
  for (auto const& section : sections) bytes += section.last - section.first;
  return bytes;
}

void each_line(std::string_view lines, std::function<void(std::string_view, std::int64_t)> const& use) {
  for (std::int64_t number = 0; !lines.empty(); ++number) {
    auto const end = std::min(lines.find('\n'), lines.size());
    auto const line = lines.substr(0, end);
    lines.remove_prefix(std::min(end + 1, lines.size()));
    if (line.find_first_not_of(" \t\r") != std::string_view::npos) use(line, number);
  }
}

void CorpusReader::open() {
  auto const& section = sections_[section_];
  stream_ = std::ifstream(section.path, std::ios::binary);
  if (!stream_) cannot(section.name, "opened", errno);
  stream_.seekg(static_cast<std::streamoff>(section.first));
  offset_ = section.first;
  left_ = section.last - section.first;
  line_ = 1;
  open_ = true;
}

void CorpusReader::read(std::size_t bytes) {
  auto const held = ahead_.size();
  auto const wanted = static_cast<std::size_t>(std::min<std::uint64_t>(bytes, left_));
  ahead_.resize(held + wanted);
  stream_.read(ahead_.data() + held, static_cast<std::streamsize>(wanted));
  if (static_cast<std::size_t>(stream_.gcount()) != wanted)
    fsdp::fail<fsdp::ConfigError>(
        "'{}' cannot be read beyond byte {}, but it had {} bytes before; was it changed meanwhile?",
        sections_[section_].name, offset_ + held + static_cast<std::size_t>(stream_.gcount()),
        sections_[section_].last);
  left_ -= wanted;
}

std::size_t CorpusReader::place_of_cut(Section::Kind kind) const {
  if (left_ == 0) return ahead_.size();
  if (kind != Section::Kind::lines) return cut_(ahead_);
  auto const newline = ahead_.rfind('\n');
  return newline == std::string::npos ? 0 : newline + 1;
}

bool CorpusReader::next(Piece& piece) {
  if (section_ == sections_.size()) return false;
  if (!open_) open();
  auto const& section = sections_[section_];
  std::size_t cut = 0;
  // Each time twice as much, so that looking for a cut in vain takes time linear in what is read.
  if (ahead_.size() < piece_bytes_) read(piece_bytes_ - ahead_.size());
  while ((cut = place_of_cut(section.kind)) == 0 && left_ > 0) read(ahead_.size());

  auto rest = ahead_.substr(cut);
  ahead_.resize(cut);
  piece = {std::move(ahead_), &section, offset_, document_, line_, false};
  ahead_ = std::move(rest);
  offset_ += cut;
  bool const finished = left_ == 0 && ahead_.empty();
  if (section.kind == Section::Kind::lines) {
    each_line(piece.bytes, [&](std::string_view, std::int64_t) { ++document_; });
    line_ += std::count(piece.bytes.begin(), piece.bytes.end(), '\n');
  } else if (section.kind == Section::Kind::document && finished) {
    piece.ends_document = true;
    ++document_;
  }
  if (finished) {
    ++section_;
    open_ = false;
  }
  return true;
}

std::int64_t DocumentSplit::stratum(std::int64_t document) const {
  return static_cast<std::int64_t>(std::floor(static_cast<double>(document) * fraction_));
}

std::int64_t DocumentSplit::begin_of(std::int64_t stratum_number) const {
  auto begin = static_cast<std::int64_t>(std::ceil(static_cast<double>(stratum_number) / fraction_));
  while (begin > 0 && stratum(begin - 1) >= stratum_number) --begin;  // what rounding may leave
  while (stratum(begin) < stratum_number) ++begin;
  return begin;
}

Split DocumentSplit::of(std::int64_t document) const {
  auto const number = stratum(document);
  auto const begin = begin_of(number), end = begin_of(number + 1);
  auto const drawn = mix(static_cast<std::uint64_t>(number)) % static_cast<std::uint64_t>(end - begin);
  return document == begin + static_cast<std::int64_t>(drawn) ? Split::val : Split::train;
}

}  // namespace transformer
