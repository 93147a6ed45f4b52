// SPDX-License-Identifier: Apache-2.0
// The files that `prepare` reads.
#include "transformer/data/input_file.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <cerrno>
#include <cstdlib>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string_view>
#include <system_error>
#include <vector>

#include "fsdp/error.hpp"
#include "fsdp/json.hpp"
#include "transformer/data/json_line.hpp"
#include "transformer/launch/program.hpp"

namespace transformer {
namespace {

namespace fs = std::filesystem;

[[noreturn]] void cannot(std::string const& name, std::string_view what) {
  fsdp::fail<fsdp::ConfigError>("'{}' cannot be {}: {}", name, what, std::generic_category().message(errno));
}

/// First bytes by which files of other formats are known.
struct Format {
  std::string_view magic, name, program;  ///< `program` writes the text that is in the file to its output
};
constexpr std::array formats{Format{"\x1f\x8b", "gzip", "zcat"}, Format{"\x28\xb5\x2f\xfd", "zstd", "zstdcat"},
                             Format{{"\xfd"
                                     "7zXZ\0",
                                     6},
                                    "xz",
                                    "xzcat"},
                             Format{"\x04\x22\x4d\x18", "lz4", "lz4cat"}, Format{"PK\x03\x04", "zip", "unzip -p"}};
constexpr std::string_view bzip2_magic = "BZh";  // then a digit, and the digits of pi
constexpr std::string_view bzip2_after_digit = "1AY&SY";

/// The name with what follows its last dot dropped, or another ending.
std::string with_ending(std::string const& name, std::string_view ending) {
  return fs::path(name).replace_extension(ending).string();
}

[[noreturn]] void refuse_compressed(std::string const& name, Format const& format, bool is_file) {
  if (!is_file)
    fsdp::fail<fsdp::ConfigError>(
        "data: {} is compressed by {}, expected text: decompress it with {}, as in ... | {} | {} prepare --data=- "
        "...",
        name, format.name, format.program, format.program, program_name);
  fsdp::fail<fsdp::ConfigError>(
      "data: '{}' is compressed by {}, expected text: decompress it with {}, as in {} '{}' | {} prepare --data=- "
      "...",
      name, format.name, format.program, format.program, name, program_name);
}

/// @param reader  pandas' function that reads it
[[noreturn]] void refuse_table(std::string const& name, std::string_view kind, std::string_view reader,
                               std::string_view packages, std::string_view otherwise) {
  auto const lines = with_ending(name, ".jsonl");
  fsdp::fail<fsdp::ConfigError>(
      "data: '{}' is a {} file, expected text or .jsonl. This command converts it, if Python has {}:\n  python3 -c "
      "\"import pandas; pandas.{}('{}')[['text']].to_json('{}', orient='records', lines=True, force_ascii=False)\"{}",
      name, kind, packages, reader, name, lines, otherwise);
}

std::string lower_ending(fs::path const& name) {
  auto ending = name.extension().string();
  std::transform(ending.begin(), ending.end(), ending.begin(),
                 [](unsigned char letter) { return static_cast<char>(std::tolower(letter)); });
  return ending;
}

constexpr std::string_view as_text_advice = "to train on it as one text, put it into a file whose name ends in .txt";

/// @param why  its first line is no document; may be empty
[[noreturn]] void refuse_json(std::string const& name, char first, std::string const& why) {
  bool const is_array = first == '[';
  fsdp::fail<fsdp::ConfigError>(
      "data: '{}' begins with '{}', as JSON does, and {}: expected text, or one JSON object in each line. jq writes "
      "the {} so, as in: jq -c {} FILE | {} prepare --data=- ...; {}",
      name, first,
      is_array ? std::string("an array is no document") : "its first line is not a JSON object (" + why + ")",
      is_array ? "elements of an array" : "objects", is_array ? "'.[]'" : ".", program_name, as_text_advice);
}

/// The form of a file whose name does not say it.
TextForm form_by_content(fs::path const& path, std::string const& name) {
  std::ifstream stream(path, std::ios::binary);
  std::string line(3, '\0');
  constexpr std::string_view byte_order_mark = "\xef\xbb\xbf";
  stream.read(line.data(), 3);
  if (line != byte_order_mark) {
    stream.clear();
    stream.seekg(0);
  }
  auto const first = (stream >> std::ws).peek();
  if (first != '{' && first != '[') return TextForm::text;
  if (first == '[') refuse_json(name, '[', {});
  std::getline(stream, line);
  fsdp::checkpoint::JsonFault fault;
  if (fsdp::checkpoint::parse_json<nlohmann::json>(line, fault).is_object()) return TextForm::lines;
  refuse_json(name, '{', fault_text(line, fault));
}

}  // namespace

bool is_stream(fs::path const& path) {
  if (path == "-") return true;
  std::error_code error;
  auto const status = fs::status(path, error);
  return fs::is_fifo(status) || fs::is_character_file(status) || fs::is_socket(status);
}

std::string shown_name(fs::path const& path) {
  return path == "-" || path == "/dev/stdin" ? "standard input" : path.string();
}

StreamCopy::StreamCopy(fs::path const& stream, fs::path const& folder) {
  auto const name = shown_name(stream);
  int const source = ::open(stream == "-" ? "/dev/stdin" : stream.c_str(), O_RDONLY | O_CLOEXEC);
  if (source < 0) cannot(name, "opened");
  file_ = ::open(folder.c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
  if (file_ < 0) {  // a file system without such files
    auto pattern = (folder / fmt::format(".{}_input_XXXXXX", program_name)).string();
    file_ = ::mkostemp(pattern.data(), O_CLOEXEC);
    if (file_ >= 0) ::unlink(pattern.c_str());
  }
  auto const failed = [&](std::string const& where, std::string_view what) {
    int const error = errno;
    ::close(source);
    if (file_ >= 0) ::close(file_);
    errno = error;
    cannot(where, what);
  };
  auto const copy = fmt::format("{}/(copy of {})", folder.string(), name);
  if (file_ < 0) failed(copy, "written");
  std::vector<char> bytes(std::size_t{1} << 20);
  while (true) {
    auto const got = ::read(source, bytes.data(), bytes.size());
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) failed(name, "read");
    if (got == 0) break;
    for (ssize_t done = 0; done < got;) {
      auto const put = ::write(file_, bytes.data() + done, static_cast<std::size_t>(got - done));
      if (put < 0 && errno == EINTR) continue;
      if (put < 0) failed(copy, "written");
      done += put;
    }
  }
  ::close(source);
}

StreamCopy::~StreamCopy() { ::close(file_); }

fs::path StreamCopy::path() const { return fmt::format("/proc/self/fd/{}", file_); }

std::optional<TextForm> form_by_name(fs::path const& name) {
  auto const ending = lower_ending(name);
  if (ending == ".txt") return TextForm::text;
  if (ending == ".jsonl" || ending == ".ndjson") return TextForm::lines;
  return std::nullopt;
}

TextForm form_of_file(fs::path const& path, std::string const& name) {
  std::array<char, 16> first{};
  std::array<char, 4> last{};
  std::ifstream stream(path, std::ios::binary);
  stream.read(first.data(), first.size());
  std::string_view const begin(first.data(), static_cast<std::size_t>(stream.gcount()));
  stream.clear();
  stream.seekg(-4, std::ios::end);
  stream.read(last.data(), last.size());
  bool const is_file = name == path.string();
  for (auto const& format : formats)
    if (begin.starts_with(format.magic)) refuse_compressed(name, format, is_file);
  if (begin.starts_with(bzip2_magic) &&
      begin.substr(std::min<std::size_t>(4, begin.size())).starts_with(bzip2_after_digit))
    refuse_compressed(name, {bzip2_magic, "bzip2", "bzcat"}, is_file);
  if (begin.starts_with("\xff\xfe") || begin.starts_with("\xfe\xff"))
    fsdp::fail<fsdp::ConfigError>(
        "data: '{}' is a text in UTF-16, expected UTF-8: convert it, as in iconv -f UTF-16 -t UTF-8 FILE | {} prepare "
        "--data=- ...",
        name, program_name);
  constexpr std::string_view parquet = "PAR1";  // at both ends
  if (begin.starts_with(parquet) && std::string_view(last.data(), last.size()) == parquet)
    refuse_table(name, "Parquet", "read_parquet", "pandas and pyarrow", "");
  if (auto const form = form_by_name(name)) return *form;
  auto const ending = lower_ending(name);
  if (ending == ".csv" || ending == ".tsv")
    refuse_table(name, ending, ending == ".csv" ? "read_csv" : "read_table", "pandas",
                 fmt::format("\n{}", as_text_advice));
  return form_by_content(path, name);
}

}  // namespace transformer
