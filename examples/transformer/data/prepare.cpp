// SPDX-License-Identifier: Apache-2.0
// Tokenizes texts into token files.
#include "transformer/data/prepare.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <deque>
#include <future>
#include <iterator>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

#include "fsdp/checkpoint.hpp"
#include "fsdp/error.hpp"
#include "transformer/data/corpus.hpp"
#include "transformer/data/dataset.hpp"
#include "transformer/data/input_file.hpp"
#include "transformer/data/json_line.hpp"
#include "transformer/data/new_file.hpp"
#include "transformer/tokenizer/byte_pair.hpp"
#include "transformer/tokenizer/characters.hpp"
#include "transformer/tokenizer/marked_texts.hpp"
#include "transformer/tokenizer/tokenizer_folder.hpp"
#include "transformer/tokenizer/utf8.hpp"

namespace transformer {
namespace {

using Json = nlohmann::json;
namespace fs = std::filesystem;

/// Reads a corpus in rounds: the threads share a round's pieces, then the results are taken in order.
class Rounds {
 public:
  Rounds(PrepareOptions const& options, std::uint64_t total) : options_(options), total_(total) {}

  /// @param work  (piece, number of the thread) -> Result, on any of the threads
  /// @param take  (Result), on the calling thread
  template <class Result, class Work, class Take>
  void run(CorpusReader reader, Work const& work, Take const& take) {
    auto const threads = static_cast<std::size_t>(options_.threads);
    while (true) {
      auto const pieces = read(reader, 4 * threads * options_.piece_bytes);
      if (pieces.empty()) return;
      std::vector<Result> results(pieces.size());
      std::atomic<std::size_t> next{0};
      auto const share = [&](std::size_t thread) {
        for (auto i = next++; i < pieces.size(); i = next++) results[i] = work(pieces[i], thread);
      };
      std::vector<std::future<void>> others;
      for (std::size_t thread = 1; thread < std::min(threads, pieces.size()); ++thread)
        others.push_back(std::async(std::launch::async, share, thread));
      share(0);
      for (auto& other : others) other.get();
      for (auto& result : results) take(std::move(result));
      for (auto const& piece : pieces) done_ += piece.bytes.size();
      if (options_.progress) options_.progress(done_, total_);
    }
  }

 private:
  static std::vector<Piece> read(CorpusReader& reader, std::size_t bytes) {
    constexpr std::size_t most_pieces = 4096;  // of small documents
    std::vector<Piece> pieces;
    for (std::size_t read = 0; read < bytes && pieces.size() < most_pieces; read += pieces.back().bytes.size()) {
      Piece piece;
      if (!reader.next(piece)) break;
      pieces.push_back(std::move(piece));
    }
    return pieces;
  }

  PrepareOptions const& options_;
  std::uint64_t total_, done_ = 0;
};

/// Calls `use(text, number of the document among the piece's)` for each document of the piece, or for its text.
template <class Use>
void each_text(Piece const& piece, Use const& use) {
  if (piece.section->kind != Section::Kind::lines) return use(std::string_view(piece.bytes), std::int64_t{0});
  std::int64_t document = 0;
  each_line(piece.bytes, [&](std::string_view line, std::int64_t number) {
    auto const text = document_of_line(line, piece.section->name, piece.first_line + number);
    use(std::string_view(text), document++);
  });
}

/// The characters of a corpus: how many, and, if they are to be tokens, which.
class Survey {
 public:
  explicit Survey(bool tokens) : seen_(tokens ? 0x110000 : 0) {}

  /// @throws fsdp::ConfigError if characters are to be tokens, and the text is not UTF-8
  void add(std::string_view text, Piece const& piece) {
    characters_ += static_cast<std::int64_t>(count_characters(text));
    if (seen_.empty()) return;
    for (std::size_t offset = 0; offset < text.size();) {
      auto const character = utf8_at(text, offset);
      if (!character.valid)
        fsdp::fail<fsdp::ConfigError>("data: '{}': byte {} (0x{:02x}) is not the beginning of a UTF-8 character",
                                      piece.section->name, piece.offset + offset,
                                      static_cast<unsigned>(character.code));
      seen_[character.code] = true;
      offset += character.length;
    }
  }
  void add(Survey const& other) {
    characters_ += other.characters_;
    for (std::size_t code = 0; code < seen_.size(); ++code)
      if (other.seen_[code]) seen_[code] = true;
  }
  std::int64_t characters() const { return characters_; }
  /// By code point.
  std::vector<std::string> symbols() const {
    std::vector<std::string> symbols;
    for (std::size_t code = 0; code < seen_.size(); ++code)
      if (seen_[code]) symbols.push_back(encode_utf8(static_cast<char32_t>(code)));
    return symbols;
  }

 private:
  std::int64_t characters_ = 0;
  std::vector<bool> seen_;  ///< by code point
};

Survey survey(std::vector<Section> const& sections, PrepareOptions const& options, bool tokens, Rounds& rounds) {
  std::vector<Survey> of_threads(static_cast<std::size_t>(options.threads), Survey(tokens));
  auto const look = [&](Piece const& piece, std::size_t thread) {
    each_text(piece, [&](std::string_view text, std::int64_t) { of_threads[thread].add(text, piece); });
    return 0;
  };
  rounds.run<int>(CorpusReader(sections, options.piece_bytes, last_whole_character), look, [](int) {});
  for (std::size_t thread = 1; thread < of_threads.size(); ++thread) of_threads[0].add(of_threads[thread]);
  return std::move(of_threads[0]);
}

/// Cuts a text's section in two.
/// @param characters  of the first part
void split_text(std::vector<Section>& sections, std::int64_t characters, std::size_t piece_bytes) {
  CorpusReader reader(sections, piece_bytes, last_whole_character);
  auto left = static_cast<std::size_t>(characters);
  std::uint64_t place = 0;
  for (Piece piece; left > 0 && reader.next(piece);) place = piece.offset + place_after(piece.bytes, left);
  auto val = sections[0];
  sections[0].last = val.first = place;
  val.split = Split::val;
  sections.push_back(val);
}

/// The tokens of a piece for one split.
struct Tokens {
  std::string bytes;  ///< as they stand in the file
  std::int64_t count = 0;
  std::vector<std::int64_t> row_ends{};  ///< tokens before the end of each row
};
struct Encoded {
  std::array<Tokens, 2> tokens;  ///< by Split
  std::int64_t characters = 0, documents = 0, empty = 0;
};

template <class Id>
Tokens pack(std::vector<std::int64_t> const& ids) {
  std::string bytes(ids.size() * sizeof(Id), '\0');
  for (std::size_t i = 0; i < ids.size(); ++i) {
    auto const id = static_cast<Id>(ids[i]);
    std::memcpy(bytes.data() + i * sizeof(Id), &id, sizeof(Id));
  }
  return {std::move(bytes), std::ssize(ids), {}};
}

/// How pieces are encoded.
struct Encoding {
  Tokenizer const& tokenizer;
  DocumentSplit const* split;  ///< null: the sections say what is for validation
  std::size_t token_bytes;
  bool rows, ends_rows;
};

Encoded encode(Piece const& piece, Encoding const& how, WordCache& cache) {
  auto const& tokenizer = how.tokenizer;
  auto const around = tokenizer.text_template();
  Encoded encoded;
  std::array<std::vector<std::int64_t>, 2> ids_of, ends_of;  // by Split
  auto const kind = piece.section->kind;
  each_text(piece, [&](std::string_view text, std::int64_t document) {
    bool const by_section = kind == Section::Kind::text || how.split == nullptr;
    auto const which =
        static_cast<std::size_t>(by_section ? piece.section->split : how.split->of(piece.first_document + document));
    auto& ids = ids_of[which];
    auto const first = ids.size();
    bool const begins = kind == Section::Kind::lines || piece.offset == piece.section->first;
    if (how.rows && begins) ids.insert(ids.end(), around.before.begin(), around.before.end());
    auto const before = ids.size();
    if (begins) tokenizer.append(text, ids, cache);
    if (!begins) tokenizer.append_rest(text, ids, cache);
    encoded.characters += static_cast<std::int64_t>(count_characters(text));
    if (kind != Section::Kind::lines && !piece.ends_document) return;
    auto const own = ids.size() - before;
    if (how.rows) ids.insert(ids.end(), around.after.begin(), around.after.end());
    if (how.ends_rows && (around.after.empty() || around.after.back() != *tokenizer.end_of_text()))
      ids.push_back(*tokenizer.end_of_text());
    bool const no_target = own == 0 || ids.size() - first < 2;
    if (how.rows && begins && no_target) {
      ids.resize(first);
      ++encoded.empty;
      return;
    }
    if (!how.rows) ids.push_back(*tokenizer.end_of_text());
    if (how.rows) ends_of[which].push_back(std::ssize(ids));
    ++encoded.documents;
  });
  for (std::size_t i = 0; i < ids_of.size(); ++i) {
    encoded.tokens[i] = how.token_bytes == 2 ? pack<std::uint16_t>(ids_of[i]) : pack<std::uint32_t>(ids_of[i]);
    encoded.tokens[i].row_ends = std::move(ends_of[i]);
  }
  return encoded;
}

std::string_view text_of(MappedFile const& file) {
  return {reinterpret_cast<char const*>(file.bytes().data()), file.bytes().size()};
}

/// Prepares one corpus.
class Preparer {
 public:
  explicit Preparer(PrepareOptions const& options)
      : options_(options),
        whole_(!options.val_data.empty() || options.val_fraction == 0),
        has_val_(!options.val_data.empty() || options.val_fraction > 0),
        characters_(options.encoder_json.empty() && options.tokenizer == nullptr) {
    std::error_code error;
    new_folder_ = fs::create_directories(options.folder, error);
    if (error)
      fsdp::fail<fsdp::ConfigError>("data: folder '{}' cannot be made: {}", options.folder.string(), error.message());
    if (new_folder_) removed_folder_.emplace(options.folder);
    auto const lock = options.folder / ".prepare.lock";
    lock_.emplace(lock, "another prepare is writing there: wait for it, or choose another --dataset",
                  fsdp::checkpoint::FileLock::AtEnd::removed);
    removed_lock_.emplace(lock);
    for (auto const* const name :
         {"train.bin", "val.bin", "train.rows", "val.rows", "meta.json", "encoder.json", "vocab.bpe"}) {
      auto const left = options.folder / (std::string(name) + ".tmp");  // by a process that was killed
      if (fs::is_regular_file(left, error)) fs::remove(left, error);
    }
  }

  Preparer(Preparer const&) = delete;
  Preparer& operator=(Preparer const&) = delete;
  /// Leaves no empty folder behind: one with files stays.
  ~Preparer() {
    files_.clear();
    removed_lock_.reset();
    lock_.reset();
    std::error_code ignored;
    if (new_folder_) fs::remove(options_.folder, ignored);
  }

  PreparedData run() {
    sections_ = open(options_.data, Split::train);
    if (!options_.val_data.empty()) {
      auto const val = open(options_.val_data, Split::val);
      sections_.insert(sections_.end(), val.begin(), val.end());
    }
    cuts_ = !documents_ && !whole_;
    // Without a cut, GPT-2's tokens are read once: nothing must be known of all of them first.
    rounds_.emplace(options_, bytes_of(sections_) * (characters_ || cuts_ ? 2 : 1));
    if (options_.tokenizer != nullptr)
      take_tokenizer();
    else if (!characters_)
      read_byte_pairs();
    if (characters_ || cuts_) look();
    bool const ends = documents_ && (!prepared_.has_rows || options_.ends_rows);
    if (ends && !tokenizer_->end_of_text())
      fsdp::fail<fsdp::ConfigError>(
          "'{}': expected a token '{}' to end documents with, got none",
          options_.tokenizer_files.empty() ? options_.encoder_json.string() : options_.tokenizer_files.front().string(),
          end_of_text_marker);
    prepared_.vocab_size = tokenizer_->size();
    prepared_.has_val = has_val_;
    token_bytes_ = prepared_.vocab_size <= 65535 ? 2 : 4;
    write_tokens();
    expect_tokens();
    meta_["vocab_size"] = prepared_.vocab_size;
    meta_["dtype"] = token_bytes_ == 2 ? "uint16" : "uint32";
    files_.emplace_back(options_.folder / meta_name).write(meta_.dump(1) + "\n");
    std::vector<fs::path> others{options_.folder / pickled_meta_name};  // of other data
    if (!has_val_) others.push_back(options_.folder / "val.bin");
    for (auto const name : names_of_tokenizer_files())  // of another tokenizer, which would be read with the new one
      if (options_.tokenizer != nullptr &&
          std::none_of(options_.tokenizer_files.begin(), options_.tokenizer_files.end(),
                       [&](fs::path const& path) { return path.filename() == name; }))
        others.push_back(options_.folder / name);
    for (auto const split : {Split::train, Split::val})
      if (!prepared_.has_rows || (split == Split::val && !has_val_))
        others.push_back(options_.folder / fmt::format("{}.rows", name(split)));
    NewFile::commit_all(files_, others, options_.folder / half_prepared_name);
    return prepared_;
  }

 private:
  /// @throws fsdp::ConfigError if there is nothing to read
  std::vector<Section> open(fs::path const& data, Split split) {
    auto const name = shown_name(data);
    auto corpus =
        is_stream(data) ? corpus_of_stream(copies_.emplace_back(data, options_.folder), name) : find_corpus(data);
    if (bytes_of(corpus.sections) == 0) fsdp::fail<fsdp::ConfigError>("data: '{}' is empty", name);
    for (auto& section : corpus.sections) section.split = split;
    documents_ = documents_ || corpus.has_documents();
    if (prepared_.ignored == 0) prepared_.first_ignored = corpus.first_ignored;
    prepared_.ignored += corpus.ignored;
    return std::move(corpus.sections);
  }

  /// @throws fsdp::ConfigError if one of the files would be without a token
  void expect_tokens() const {
    bool const drawn = documents_ && !whole_;
    if (drawn && prepared_.documents == 0)
      fsdp::fail<fsdp::ConfigError>("data: '{}' has no documents with text", shown_name(options_.data));
    if (drawn && prepared_.val_tokens == 0)
      fsdp::fail<fsdp::ConfigError>(
          "setting 'val_fraction': with {}, none of the {} documents is for validation; expected a larger fraction "
          "or more documents",
          options_.val_fraction, prepared_.documents);
    if (drawn && prepared_.train_tokens == 0)
      fsdp::fail<fsdp::ConfigError>(
          "setting 'val_fraction': with {}, all {} documents are for validation; expected a smaller fraction "
          "or more documents",
          options_.val_fraction, prepared_.documents);
    if (whole_ && prepared_.train_tokens == 0)
      fsdp::fail<fsdp::ConfigError>("data: '{}' has no documents", shown_name(options_.data));
    if (whole_ && has_val_ && prepared_.val_tokens == 0)
      fsdp::fail<fsdp::ConfigError>("data: '{}' has no documents", shown_name(options_.val_data));
  }

  void read_byte_pairs() {
    MappedFile const encoder(options_.encoder_json), merges(options_.vocab_bpe);
    auto const encoder_name = options_.encoder_json.string(), merges_name = options_.vocab_bpe.string();
    tokenizer_ =
        std::make_shared<BytePair>(BytePairFiles{text_of(encoder), text_of(merges), encoder_name, merges_name});
    meta_ = {{"tokenizer", "gpt2"}, {"encoder_json", "encoder.json"}, {"vocab_bpe", "vocab.bpe"}};
    files_.emplace_back(options_.folder / "encoder.json").write(text_of(encoder));
    files_.emplace_back(options_.folder / "vocab.bpe").write(text_of(merges));
  }

  void take_tokenizer() {
    prepared_.has_rows = documents_;
    tokenizer_ = std::make_shared<MarkedTexts>(options_.tokenizer);
    meta_ = {{"tokenizer", "model"}, {"tokenizer_files", Json::array()}, {"rows", documents_}};
    for (auto const& path : options_.tokenizer_files) {
      auto const name = path.filename().string();
      meta_["tokenizer_files"].push_back(name);
      MappedFile const file(path);
      files_.emplace_back(options_.folder / name).write(text_of(file));
    }
  }

  /// The first of two passes: which characters there are, and where a text is to be cut.
  void look() {
    auto const seen = survey(sections_, options_, characters_, *rounds_);
    if (cuts_) {
      auto const train = static_cast<double>(seen.characters()) * (1 - options_.val_fraction);
      split_text(sections_, static_cast<std::int64_t>(train), options_.piece_bytes);
    }
    if (!characters_) return;
    auto symbols = seen.symbols();
    if (documents_) symbols.emplace_back(end_of_text_marker);
    meta_ = meta_of_characters(symbols);
    tokenizer_ = std::make_shared<Characters>(std::move(symbols));
  }

  void write_tokens() {
    std::array<NewFile*, 2> const files{&files_.emplace_back(options_.folder / "train.bin"),
                                        has_val_ ? &files_.emplace_back(options_.folder / "val.bin") : nullptr};
    std::array<NewFile*, 2> rows{};
    if (prepared_.has_rows) rows[0] = &files_.emplace_back(options_.folder / "train.rows");
    if (prepared_.has_rows && has_val_) rows[1] = &files_.emplace_back(options_.folder / "val.rows");
    std::array<std::int64_t*, 2> const counts{&prepared_.train_tokens, &prepared_.val_tokens};
    DocumentSplit const split(options_.val_fraction);
    std::vector<WordCache> caches(static_cast<std::size_t>(options_.threads));
    Encoding const how{*tokenizer_, whole_ ? nullptr : &split, token_bytes_, prepared_.has_rows, options_.ends_rows};
    auto const work = [&](Piece const& piece, std::size_t thread) { return encode(piece, how, caches[thread]); };
    auto const take = [&](Encoded const& encoded) {
      prepared_.characters += encoded.characters;
      prepared_.documents += encoded.documents;
      prepared_.empty += encoded.empty;
      for (std::size_t i = 0; i < files.size(); ++i) {
        if (files[i] != nullptr) files[i]->write(encoded.tokens[i].bytes);
        std::string ends;
        for (auto const end : encoded.tokens[i].row_ends) append_row_end(ends, *counts[i] + end);
        if (rows[i] != nullptr) rows[i]->write(ends);
        *counts[i] += encoded.tokens[i].count;
      }
    };
    auto const cut = [&](std::string_view text) { return tokenizer_->last_cut(text); };
    rounds_->run<Encoded>(CorpusReader(sections_, options_.piece_bytes, cut), work, take);
  }

  PrepareOptions const& options_;
  bool whole_;                     ///< all of `data` is for training
  bool has_val_, characters_;      ///< val.bin is written; tokens are characters
  bool documents_ = false;         ///< there are some, and tokens that end them
  bool cuts_ = false;              ///< one text is cut in two
  std::deque<StreamCopy> copies_;  ///< of pipes
  std::vector<Section> sections_;
  bool new_folder_ = false;
  std::optional<RemovedOnSignal> removed_folder_;
  std::optional<fsdp::checkpoint::FileLock> lock_;  ///< of the folder
  std::optional<RemovedOnSignal> removed_lock_;
  std::optional<Rounds> rounds_;
  std::deque<NewFile> files_;  ///< in the order in which they get their names
  Json meta_;
  std::shared_ptr<Tokenizer const> tokenizer_;
  std::size_t token_bytes_ = 2;
  PreparedData prepared_;
};

}  // namespace

PreparedData prepare_data(PrepareOptions const& options) { return Preparer(options).run(); }

}  // namespace transformer
