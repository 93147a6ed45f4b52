// SPDX-License-Identifier: Apache-2.0
#include "sample.hpp"

#include <fmt/format.h>

#include <cerrno>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <system_error>
#include <utility>

#include "fsdp/error.hpp"

namespace nanogpt {
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
    auto const ids = tokenizer.encode(text, Marker::token);
    return {ids.begin(), ids.end()};
  } catch (fsdp::ConfigError const& error) {
    fsdp::fail<fsdp::ConfigError>("setting 'start': {}", error.what());
  }
}

}  // namespace

SampleRequest read_sample_request(Settings const& settings, std::int64_t ranks) {
  check_together(settings, Command::sample, ranks);
  SampleRequest request;
  if (settings.init_from == "resume") {
    auto opened = open_run(settings);
    request.model = std::move(opened.model);
    request.note = std::move(opened.note);
  } else {
    request.model = open_pretrained(settings);
  }
  request.tokenizer = open_tokenizer(request.model, settings);
  if (request.tokenizer == nullptr)
    fsdp::fail<fsdp::ConfigError>(
        "'{}' has weights but no vocabulary (vocab.json and merges.txt, or a meta.json with 'itos' or 'tokenizer'), so "
        "no text can be printed; name GPT-2's files with --encoder_json=FILE and --vocab_bpe=FILE",
        request.model.weights->path().string());
  if (settings.stop_at_end && !request.tokenizer->end_of_text())
    fsdp::fail<fsdp::ConfigError>("setting 'stop_at_end': the vocabulary has no {} to stop at", end_of_text_marker);
  request.start = start_tokens(*request.tokenizer, settings.start);
  return request;
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

}  // namespace nanogpt
