// SPDX-License-Identifier: Apache-2.0
// Token files on disk with what made them, and the sequences read from them.
#include "data.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <iterator>
#include <nlohmann/json.hpp>
#include <system_error>

#include "fsdp/error.hpp"
#include "tokenizer/byte_pair.hpp"
#include "tokenizer/characters.hpp"
#include "window_order.hpp"

namespace nanogpt {
namespace {

using Json = nlohmann::json;
namespace fs = std::filesystem;

std::string system_text(int error) { return std::generic_category().message(error); }

std::string_view as_text(std::span<std::byte const> bytes) {
  return {reinterpret_cast<char const*>(bytes.data()), bytes.size()};
}

/// Whether `name` is that of a file beside meta.json, which cannot lead out of its folder.
bool is_plain_name(std::string const& name) {
  return !name.empty() && name != "." && name != ".." && name.find('/') == std::string::npos;
}

/// [Note: Headers of tokens]
/// llm.c's files begin with 256 int32 (dev/data/data_common.py): magic, version, number of tokens, zeros. A file
/// without a header cannot begin like this by chance: as uint16 ids both magics begin with one above GPT-2's last,
/// 50256.
struct HeaderKind {
  std::int32_t magic, version;
  std::size_t token_bytes;
};
constexpr HeaderKind header_kinds[] = {{20240520, 1, 2}, {20240801, 7, 4}};
constexpr std::size_t header_words = 256;

}  // namespace

MappedFile::MappedFile(fs::path const& path) {
  int const descriptor = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (descriptor < 0) fsdp::fail<fsdp::ConfigError>("'{}' cannot be opened: {}", path.string(), system_text(errno));
  struct stat status {};
  int error = 0;
  if (::fstat(descriptor, &status) != 0) error = errno;
  if (error == 0 && !S_ISREG(status.st_mode)) error = S_ISDIR(status.st_mode) ? EISDIR : EINVAL;
  if (error == 0 && status.st_size > 0) {
    void* const address =
        ::mmap(nullptr, static_cast<std::size_t>(status.st_size), PROT_READ, MAP_SHARED, descriptor, 0);
    if (address == MAP_FAILED) {
      error = errno;
    } else {
      data_ = static_cast<std::byte const*>(address);
      size_ = static_cast<std::size_t>(status.st_size);
    }
  }
  ::close(descriptor);
  if (error != 0) fsdp::fail<fsdp::ConfigError>("'{}' cannot be read: {}", path.string(), system_text(error));
}

MappedFile::~MappedFile() {
  if (data_ != nullptr) ::munmap(const_cast<std::byte*>(data_), size_);
}

Meta read_meta(fs::path const& path) {
  Meta meta;
  std::error_code error;
  if (!fs::exists(path, error)) return meta;
  MappedFile const file(path);
  auto const json = Json::parse(as_text(file.bytes()), nullptr, false);
  auto const wrong = [&](std::string_view what) { fsdp::fail<fsdp::ConfigError>("'{}': {}", path.string(), what); };
  if (!json.is_object()) wrong("expected a JSON object");
  if (!json.contains("vocab_size") || !json["vocab_size"].is_number_integer())
    wrong("expected a whole number 'vocab_size'");
  meta.vocab_size = json["vocab_size"].get<std::int64_t>();
  if (meta.vocab_size < 1 || meta.vocab_size > 100'000'000)
    wrong(fmt::format("vocab_size {} is out of range", meta.vocab_size));
  Json const dtype = json.value("dtype", Json("uint16"));
  if (dtype != "uint16" && dtype != "uint32")
    wrong(fmt::format("dtype: expected \"uint16\" or \"uint32\", got {}", dtype.dump()));
  meta.token_bytes = dtype == "uint16" ? 2 : 4;
  meta.path = path;
  if (json.contains("itos")) {
    auto const& itos = json["itos"];
    if (!itos.is_array() || static_cast<std::int64_t>(itos.size()) != meta.vocab_size)
      wrong(fmt::format("expected an array 'itos' of vocab_size = {} texts", meta.vocab_size));
    std::vector<std::string> symbols;
    for (auto const& symbol : itos) {
      if (!symbol.is_string()) wrong("expected texts in 'itos'");
      symbols.push_back(symbol.get<std::string>());
    }
    try {
      meta.characters = std::make_shared<Characters>(std::move(symbols));
    } catch (fsdp::ConfigError const& twice) {
      wrong(twice.what());
    }
  }
  if (!json.contains("tokenizer") || json["tokenizer"] == "char") return meta;
  if (json["tokenizer"] != "gpt2")
    wrong(fmt::format("tokenizer: expected \"char\" or \"gpt2\", got {}", json["tokenizer"].dump()));
  for (auto const* const key : {"encoder_json", "vocab_bpe"}) {
    auto const name = json.contains(key) && json[key].is_string() ? json[key].get<std::string>() : std::string();
    if (!is_plain_name(name)) wrong(fmt::format("{}: expected the name of a file beside meta.json", key));
    if (!fs::is_regular_file(path.parent_path() / name, error))
      wrong(fmt::format("{}: '{}' is missing", key, (path.parent_path() / name).string()));
    meta.tokenizer_files.push_back(name);
  }
  return meta;
}

std::shared_ptr<Tokenizer const> open_tokenizer(Meta const& meta) {
  if (meta.tokenizer_files.empty()) return meta.characters;
  auto const encoder_path = meta.path.parent_path() / meta.tokenizer_files.at(0);
  auto const merges_path = meta.path.parent_path() / meta.tokenizer_files.at(1);
  MappedFile const encoder(encoder_path), merges(merges_path);
  auto const encoder_name = encoder_path.string(), merges_name = merges_path.string();
  auto const tokenizer = std::make_shared<BytePair>(
      BytePairFiles{as_text(encoder.bytes()), as_text(merges.bytes()), encoder_name, merges_name});
  if (tokenizer->size() != meta.vocab_size)
    fsdp::fail<fsdp::ConfigError>("'{}' has {} tokens, but '{}' says vocab_size {}", encoder_name, tokenizer->size(),
                                  meta.path.string(), meta.vocab_size);
  return tokenizer;
}

TokenFile::TokenFile(fs::path const& path, std::size_t token_bytes) : path_(path), token_bytes_(token_bytes) {
  std::error_code error;
  if (!fs::exists(path, error))
    fsdp::fail<fsdp::ConfigError>("data: '{}' is missing; write it with: nanogpt prepare --dataset=NAME --data=FILE",
                                  path.string());
  file_ = MappedFile(path);
  if (file_.bytes().empty()) fsdp::fail<fsdp::ConfigError>("data: '{}' is empty", path.string());
  read_header();
  auto const bytes = tokens().size();
  if (bytes % token_bytes_ != 0)
    fsdp::fail<fsdp::ConfigError>(
        "data: '{}' has {} bytes, which is not a multiple of {}: it is truncated or not a token file", path.string(),
        bytes, token_bytes_);
  size_ = static_cast<std::int64_t>(bytes / token_bytes_);
}

void TokenFile::read_header() {
  std::array<std::int32_t, 3> words{};  // magic, version, number of tokens
  auto const bytes = file_.bytes();
  if (bytes.size() < sizeof words[0]) return;
  std::memcpy(words.data(), bytes.data(), std::min(sizeof words, bytes.size()));
  auto const* const kind = std::find_if(std::begin(header_kinds), std::end(header_kinds),
                                        [&](HeaderKind const& known) { return known.magic == words[0]; });
  if (kind == std::end(header_kinds)) return;
  header_bytes_ = header_words * sizeof words[0];
  if (bytes.size() < header_bytes_)
    fsdp::fail<fsdp::ConfigError>(
        "data: '{}' begins like llm.c's token files, whose header has {} bytes; the file has only {}", path_.string(),
        header_bytes_, bytes.size());
  if (words[1] != kind->version)
    fsdp::fail<fsdp::ConfigError>("data: '{}' has llm.c's header {} in version {}, expected version {}", path_.string(),
                                  kind->magic, words[1], kind->version);
  token_bytes_ = kind->token_bytes;
  auto const expected = static_cast<std::uint64_t>(std::max(words[2], 0)) * token_bytes_;
  if (words[2] <= 0 || tokens().size() != expected)
    fsdp::fail<fsdp::ConfigError>(
        "data: '{}': its header says {} tokens of {} bytes, but {} bytes follow: it is truncated or not a token file",
        path_.string(), words[2], token_bytes_, tokens().size());
}

std::int64_t TokenFile::at(std::int64_t index) const {
  auto const* const from = tokens().data() + static_cast<std::size_t>(index) * token_bytes_;
  if (token_bytes_ == 2) {
    std::uint16_t id{};
    std::memcpy(&id, from, sizeof id);
    return id;
  }
  std::uint32_t id{};
  std::memcpy(&id, from, sizeof id);
  return id;
}

template <class Id>
void TokenFile::check_ids_as(std::int64_t vocab_size, std::int64_t first, std::int64_t last) const {
  auto const* const ids = reinterpret_cast<Id const*>(tokens().data());
  for (auto index = first; index < last; ++index)
    if (static_cast<std::int64_t>(ids[index]) >= vocab_size)
      fsdp::fail<fsdp::ConfigError>("data: '{}' has token {} at position {}, outside the vocabulary of {}",
                                    path_.string(), ids[index], index, vocab_size);
}

void TokenFile::check_ids(std::int64_t vocab_size, std::int64_t first, std::int64_t last) const {
  if (token_bytes_ == 2) return vocab_size > 65535 ? void() : check_ids_as<std::uint16_t>(vocab_size, first, last);
  check_ids_as<std::uint32_t>(vocab_size, first, last);
}

Dataset open_dataset(std::string const& name) {
  auto const folder = fs::path("data") / name;
  std::error_code error;
  if (!fs::is_directory(folder, error))
    fsdp::fail<fsdp::ConfigError>(
        "data: there is no folder '{}' for dataset '{}'; make it with: nanogpt prepare --dataset={} --data=FILE",
        folder.string(), name, name);
  auto meta = read_meta(folder / "meta.json");
  auto const token_bytes = meta.token_bytes;
  return {std::move(meta), TokenFile(folder / "train.bin", token_bytes), TokenFile(folder / "val.bin", token_bytes)};
}

std::int64_t draw_offset(std::uint64_t seed, Draw draw, std::uint64_t batch, std::uint64_t sequence,
                         std::int64_t choices) {
  auto const word = mix(mix(mix(mix(seed) ^ static_cast<std::uint64_t>(draw)) ^ batch) ^ sequence);
  return static_cast<std::int64_t>(word % static_cast<std::uint64_t>(choices));  // bias below choices / 2^64
}

void fill_sequence(TokenFile const& tokens, std::int64_t start, std::span<std::int32_t> inputs,
                   std::span<std::int32_t> targets) {
  auto const length = static_cast<std::int64_t>(inputs.size());
  FSDP_EXPECTS(start >= 0 && start < tokens.size() - length,
               "data: '{}' has {} tokens, too few for a block of {} at {}", tokens.path().string(), tokens.size(),
               length, start);
  FSDP_EXPECTS(inputs.size() == targets.size(), "a sequence of {} inputs has {} targets", inputs.size(),
               targets.size());
  for (std::size_t position = 0; position < inputs.size(); ++position) {
    auto const index = start + static_cast<std::int64_t>(position);
    inputs[position] = static_cast<std::int32_t>(tokens.at(index));
    targets[position] = static_cast<std::int32_t>(tokens.at(index + 1));
  }
}

}  // namespace nanogpt
