// SPDX-License-Identifier: Apache-2.0
// nanogpt sample, as far as it needs no engine: what is to be continued, by which model, and the printing of it.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "gpt2/open_model.hpp"
#include "transformer/run/choices.hpp"
#include "transformer/run/table.hpp"
#include "transformer/tokenizer/text_stream.hpp"
#include "transformer/tokenizer/tokenizer.hpp"

namespace nanogpt {

/// What every rank knows before it begins.
struct SampleRequest {
  OpenedModel model;
  std::string note;  ///< what the user should know of the model; empty: nothing
  std::shared_ptr<Tokenizer const> tokenizer;
  std::vector<std::int32_t> start;  ///< the text to continue; not empty
};

/// Reads the settings of `sample` and the files that they name.
/// @param ranks  ranks in the world
/// @throws fsdp::ConfigError saying what is missing or wrong
SampleRequest read_sample_request(Settings const& settings, std::int64_t ranks);

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

}  // namespace nanogpt
