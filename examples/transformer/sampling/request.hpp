// SPDX-License-Identifier: Apache-2.0
// `sample` without an engine: the text to continue, and the printing of samples.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "transformer/run/settings.hpp"
#include "transformer/tokenizer/text_stream.hpp"
#include "transformer/tokenizer/tokenizer.hpp"

namespace transformer {

/// The text to continue.
struct SampleText {
  std::shared_ptr<Tokenizer const> tokenizer;
  std::vector<std::int32_t> start;   ///< not empty
  std::vector<std::int64_t> ends{};  ///< ids that end a sample with stop_at_end, beside the tokenizer's
};

/// Input of the ranks of `sample`: model, text and note.
/// @tparam Opened  a model whose weights have been found
template <class Opened>
struct SampleRequest {
  Opened model;
  std::string note;  ///< about the choice of the model, for the user; may be empty
  SampleText text;
};

/// Reads the settings `start` and `stop_at_end`. The end-of-text marker in `start` is a token if the vocabulary has it.
/// @throws fsdp::ConfigError naming the setting and what is wrong
SampleText read_sample_text(Settings const& settings, std::shared_ptr<Tokenizer const> tokenizer);

/// Prints samples to standard output while they grow: each token when it is known, a line of dashes after each sample.
class SamplePrinter {
 public:
  /// @param tokenizer  must outlive it
  explicit SamplePrinter(Tokenizer const& tokenizer) : text_(tokenizer) {}

  /// @throws fsdp::ResourceError if it cannot be written, unless because nobody reads any more
  void add(std::int64_t id) { write(text_.add(id)); }
  void end_sample();
  /// Nobody reads standard output any more (`| head`): nothing is printed from now on.
  bool closed() const { return closed_; }

 private:
  void write(std::string_view text);

  TextStream text_;
  bool closed_ = false;
};

}  // namespace transformer
