// SPDX-License-Identifier: Apache-2.0
// Token files and vocabularies on disk, and the sequences read from them.
#include "data.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>
#include <system_error>

#include "fsdp/error.hpp"
#include "window_order.hpp"

namespace nanogpt {
namespace {

using Json = nlohmann::json;
namespace fs = std::filesystem;

std::string system_text(int error) { return std::generic_category().message(error); }

std::string_view as_text(std::span<std::byte const> bytes) {
  return {reinterpret_cast<char const*>(bytes.data()), bytes.size()};
}

/// Length of the UTF-8 sequence that `lead` begins; 0 if none does.
std::size_t sequence_length(unsigned char lead) {
  if (lead < 0x80) return 1;
  if (lead >= 0xc2 && lead <= 0xdf) return 2;
  if (lead >= 0xe0 && lead <= 0xef) return 3;
  if (lead >= 0xf0 && lead <= 0xf4) return 4;
  return 0;
}

/// Decodes the sequence at `offset`; false if it is cut off, overlong, a surrogate or beyond U+10FFFF.
bool decode_one(std::string_view text, std::size_t offset, std::size_t& length, char32_t& character) {
  auto const lead = static_cast<unsigned char>(text[offset]);
  length = sequence_length(lead);
  if (length == 0 || offset + length > text.size()) return false;
  constexpr std::array<unsigned, 5> masks{0, 0x7f, 0x1f, 0x0f, 0x07};
  character = lead & masks[length];
  for (std::size_t index = 1; index < length; ++index) {
    auto const next = static_cast<unsigned char>(text[offset + index]);
    if ((next & 0xc0u) != 0x80u) return false;
    character = (character << 6) | (next & 0x3fu);
  }
  constexpr std::array<char32_t, 5> least{0, 0, 0x80, 0x800, 0x10000};
  return character >= least[length] && character <= 0x10ffff && !(character >= 0xd800 && character <= 0xdfff);
}

void write_file(fs::path const& path, std::string_view bytes) {
  auto const temporary = fs::path(path) += ".tmp";
  {
    std::ofstream stream(temporary, std::ios::binary | std::ios::trunc);
    stream.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
    stream.flush();
    if (!stream) fsdp::fail<fsdp::ConfigError>("'{}' cannot be written: {}", temporary.string(), system_text(errno));
  }
  std::error_code error;
  fs::rename(temporary, path, error);
  if (error)
    fsdp::fail<fsdp::ConfigError>("'{}' cannot be renamed to '{}': {}", temporary.string(), path.string(),
                                  error.message());
}

template <class Id>
std::string pack_tokens(std::span<std::uint32_t const> tokens) {
  std::string bytes(tokens.size() * sizeof(Id), '\0');
  for (std::size_t index = 0; index < tokens.size(); ++index) {
    auto const id = static_cast<Id>(tokens[index]);
    std::memcpy(bytes.data() + index * sizeof(Id), &id, sizeof(Id));
  }
  return bytes;
}

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

std::vector<char32_t> decode_utf8(std::string_view text, std::string_view origin) {
  std::vector<char32_t> characters;
  characters.reserve(text.size());
  for (std::size_t offset = 0, length = 0; offset < text.size(); offset += length) {
    char32_t character{};
    if (!decode_one(text, offset, length, character))
      fsdp::fail<fsdp::ConfigError>("{}: byte {} (0x{:02x}) begins no valid UTF-8 character", origin, offset,
                                    static_cast<unsigned>(static_cast<unsigned char>(text[offset])));
    characters.push_back(character);
  }
  return characters;
}

std::string encode_utf8(char32_t character) {
  auto const code = static_cast<std::uint32_t>(character);
  auto const byte = [](std::uint32_t value) { return static_cast<char>(static_cast<unsigned char>(value)); };
  if (code < 0x80) return {byte(code)};
  if (code < 0x800) return {byte(0xc0u | (code >> 6)), byte(0x80u | (code & 0x3fu))};
  if (code < 0x10000)
    return {byte(0xe0u | (code >> 12)), byte(0x80u | ((code >> 6) & 0x3fu)), byte(0x80u | (code & 0x3fu))};
  return {byte(0xf0u | (code >> 18)), byte(0x80u | ((code >> 12) & 0x3fu)), byte(0x80u | ((code >> 6) & 0x3fu)),
          byte(0x80u | (code & 0x3fu))};
}

std::vector<std::int64_t> Vocabulary::encode(std::string_view text) const {
  std::vector<std::int64_t> ids;
  for (char32_t const character : decode_utf8(text, "text")) {
    auto const found = stoi.find(encode_utf8(character));
    if (found == stoi.end())
      fsdp::fail<fsdp::ConfigError>("text: character '{}' (U+{:04X}) is not among the {} of the vocabulary",
                                    encode_utf8(character), static_cast<std::uint32_t>(character), size());
    ids.push_back(found->second);
  }
  return ids;
}

std::string Vocabulary::decode(std::span<std::int64_t const> ids) const {
  std::string text;
  for (auto const id : ids) {
    if (id < 0 || id >= size()) fsdp::fail<fsdp::ConfigError>("token {} lies outside the vocabulary of {}", id, size());
    text += itos[static_cast<std::size_t>(id)];
  }
  return text;
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
  std::string dtype = "uint16";
  if (json.contains("dtype")) dtype = json["dtype"].is_string() ? json["dtype"].get<std::string>() : "?";
  if (dtype != "uint16" && dtype != "uint32") wrong(fmt::format("dtype: expected uint16 or uint32, got '{}'", dtype));
  meta.token_bytes = dtype == "uint16" ? 2 : 4;
  if (json.contains("itos")) {
    auto const& itos = json["itos"];
    if (!itos.is_array() || static_cast<std::int64_t>(itos.size()) != meta.vocab_size)
      wrong(fmt::format("expected an array 'itos' of vocab_size = {} texts", meta.vocab_size));
    for (auto const& symbol : itos) {
      if (!symbol.is_string()) wrong("expected texts in 'itos'");
      auto const id = meta.vocabulary.size();
      meta.vocabulary.itos.push_back(symbol.get<std::string>());
      if (!meta.vocabulary.stoi.emplace(meta.vocabulary.itos.back(), id).second)
        wrong("a symbol stands twice in 'itos'");
    }
  }
  meta.path = path;
  return meta;
}

TokenFile::TokenFile(fs::path const& path, std::size_t token_bytes) : path_(path), token_bytes_(token_bytes) {
  std::error_code error;
  if (!fs::exists(path, error))
    fsdp::fail<fsdp::ConfigError>("data: '{}' is missing (nanogpt prepare --dataset=NAME --data=FILE writes it)",
                                  path.string());
  file_ = MappedFile(path);
  auto const bytes = file_.bytes().size();
  if (bytes == 0) fsdp::fail<fsdp::ConfigError>("data: '{}' is empty", path.string());
  if (bytes % token_bytes != 0)
    fsdp::fail<fsdp::ConfigError>(
        "data: '{}' has {} bytes, which is not a multiple of {}: it is truncated or not a token file", path.string(),
        bytes, token_bytes);
  size_ = static_cast<std::int64_t>(bytes / token_bytes);
}

std::int64_t TokenFile::at(std::int64_t index) const {
  auto const* const from = file_.bytes().data() + static_cast<std::size_t>(index) * token_bytes_;
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
  auto const* const ids = reinterpret_cast<Id const*>(file_.bytes().data());
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
        "data: there is no folder '{}' for dataset '{}' (nanogpt prepare --dataset={} --data=FILE makes it)",
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

PreparedText prepare_text(fs::path const& text_file, fs::path const& folder) {
  MappedFile const file(text_file);
  auto const characters = decode_utf8(as_text(file.bytes()), fmt::format("data: '{}'", text_file.string()));
  if (characters.empty()) fsdp::fail<fsdp::ConfigError>("data: '{}' is empty", text_file.string());
  auto symbols = characters;
  std::sort(symbols.begin(), symbols.end());
  symbols.erase(std::unique(symbols.begin(), symbols.end()), symbols.end());

  std::vector<std::uint32_t> tokens;
  tokens.reserve(characters.size());
  for (char32_t const character : characters)
    tokens.push_back(
        static_cast<std::uint32_t>(std::lower_bound(symbols.begin(), symbols.end(), character) - symbols.begin()));

  auto itos = Json::array();
  auto stoi = Json::object();
  for (std::size_t id = 0; id < symbols.size(); ++id) {
    itos.push_back(encode_utf8(symbols[id]));
    stoi[encode_utf8(symbols[id])] = id;
  }
  bool const narrow = symbols.size() <= 65535;
  Json const meta{
      {"vocab_size", symbols.size()}, {"itos", itos}, {"stoi", stoi}, {"dtype", narrow ? "uint16" : "uint32"}};

  std::error_code error;
  fs::create_directories(folder, error);
  if (error) fsdp::fail<fsdp::ConfigError>("data: folder '{}' cannot be made: {}", folder.string(), error.message());
  auto const train_size = tokens.size() / 10 * 9 + tokens.size() % 10 * 9 / 10;  // floor(0.9 n), without overflow
  auto const all = std::span<std::uint32_t const>(tokens);
  auto const pack = narrow ? &pack_tokens<std::uint16_t> : &pack_tokens<std::uint32_t>;
  write_file(folder / "train.bin", pack(all.first(train_size)));
  write_file(folder / "val.bin", pack(all.subspan(train_size)));
  write_file(folder / "meta.json", meta.dump(1) + "\n");
  return {static_cast<std::int64_t>(tokens.size()), static_cast<std::int64_t>(symbols.size()),
          static_cast<std::int64_t>(train_size), static_cast<std::int64_t>(tokens.size() - train_size)};
}

}  // namespace nanogpt
