// SPDX-License-Identifier: Apache-2.0
#include "transformer/sampling/request.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <system_error>
#include <utility>

#include "fsdp/error.hpp"

namespace transformer {
namespace {

std::string start_text(std::string const& start) {
  if (!start.starts_with("FILE:")) return start;
  auto const path = start.substr(5);
  if (std::error_code error; std::filesystem::is_directory(path, error))
    fsdp::fail<fsdp::ConfigError>("setting 'start': '{}' is a folder", path);
  std::ifstream stream(path, std::ios::binary);
  std::string text{std::istreambuf_iterator<char>(stream), {}};
  if (!stream) fsdp::fail<fsdp::ConfigError>("setting 'start': the file '{}' cannot be read", path);
  if (text.empty()) fsdp::fail<fsdp::ConfigError>("setting 'start': the file '{}' is empty", path);
  return text;
}

/// The marker in `start` is the token that ends a document, where the vocabulary has one.
std::vector<std::int32_t> start_tokens(Tokenizer const& tokenizer, std::string const& start) {
  auto const text = start_text(start);
  try {
    auto ids = tokenizer.encode(text, Marker::token);
    auto const before = tokenizer.text_template().before;  // without those behind it, for the text goes on
    bool const has_them = ids.size() >= before.size() && std::equal(before.begin(), before.end(), ids.begin());
    if (!has_them) ids.insert(ids.begin(), before.begin(), before.end());
    if (ids.empty()) fsdp::fail<fsdp::ConfigError>("expected a text that is not empty, got nothing");
    return {ids.begin(), ids.end()};
  } catch (fsdp::ConfigError const& error) {
    fsdp::fail<fsdp::ConfigError>("setting 'start': {}", error.what());
  }
}

}  // namespace

SampleText read_sample_text(Settings const& settings, std::shared_ptr<Tokenizer const> tokenizer) {
  if (settings.stop_at_end && !tokenizer->end_of_text())
    fsdp::fail<fsdp::ConfigError>("setting 'stop_at_end': the vocabulary has no {} to stop at", end_of_text_marker);
  SampleText text{std::move(tokenizer), {}};
  text.start = start_tokens(*text.tokenizer, settings.start);
  return text;
}

void SamplePrinter::end_sample() {
  write(text_.end());
  write("\n---------------\n");
}

void SamplePrinter::write(std::string_view text) {
  if (closed_ || text.empty()) return;
  errno = 0;
  if (std::fwrite(text.data(), 1, text.size(), stdout) == text.size() && std::fflush(stdout) == 0) return;
  int const why = errno;
  if (why != EPIPE)
    fsdp::fail<fsdp::ResourceError>("standard output cannot be written: {}", std::generic_category().message(why));
  closed_ = true;
}

}  // namespace transformer
