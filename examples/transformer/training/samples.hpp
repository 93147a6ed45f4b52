// SPDX-License-Identifier: Apache-2.0
// Texts that a model writes while it is trained.
#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <random>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "fsdp/error.hpp"
#include "transformer/data/dataset.hpp"
#include "transformer/run/choices.hpp"
#include "transformer/run/table.hpp"
#include "transformer/sampling/continuation.hpp"
#include "transformer/sampling/next_token.hpp"
#include "transformer/tokenizer/tokenizer.hpp"
#include "transformer/training/preparation.hpp"

namespace transformer {

/// The tokenizer of the data, or of the weights that training begins with.
/// @throws fsdp::ConfigError if there is none
template <class Program>
std::shared_ptr<Tokenizer const> tokenizer_of(Preparation<Program> const& ready) {
  auto found = ready.tokenizer != nullptr ? ready.tokenizer : open_tokenizer(ready.dataset->meta);
  if (found == nullptr && ready.pretrained) found = Program::tokenizer(*ready.pretrained, ready.settings);
  if (found == nullptr)
    fsdp::fail<fsdp::ConfigError>(
        "setting 'sample_interval': the data set '{}' has no vocabulary (a meta.json with 'itos' or 'tokenizer'), so "
        "samples cannot be printed: expected 0, got {}",
        ready.settings.dataset, ready.settings.sample_interval);
  return found;
}

/// The token that a text begins with: the first of the tokenizer's template, else the one between documents, else a
/// newline, else the first of the vocabulary.
inline std::int32_t first_token(Tokenizer const& tokenizer) {
  if (auto const around = tokenizer.text_template(); !around.before.empty())
    return static_cast<std::int32_t>(around.before.front());
  if (auto const end = tokenizer.end_of_text()) return static_cast<std::int32_t>(*end);
  try {
    return static_cast<std::int32_t>(tokenizer.encode("\n", Marker::text).at(0));
  } catch (fsdp::ConfigError const&) {  // the text that the vocabulary is of has no newline
    return 0;
  }
}

/// Rank 0 draws tokens and tells the others; see [Note: Samples of several ranks].
/// @tparam T  Trainer
template <class T>
class TrainingSamples {
 public:
  TrainingSamples(T& trainer, Settings const& settings, Preparation<typename T::Program> const& ready)
      : trainer_(trainer), settings_(settings), draws_(trainer.engine().rank() == 0) {
    if (settings.sample_interval > 0 && draws_) tokenizer_ = tokenizer_of(ready);
  }

  bool is_due(std::int64_t iteration) const {
    return settings_.sample_interval > 0 && iteration % settings_.sample_interval == 0;
  }

  /// Writes sample_tokens tokens. They follow from the weights, the seed and the iteration.
  /// @param watch  void(std::int64_t done): called once a token
  /// @return the text on rank 0; empty elsewhere
  /// @note Collective: yes.
  template <class Watch>
  std::string write(std::int64_t iteration, Watch&& watch) {
    std::mt19937_64 random(static_cast<std::uint64_t>(settings_.seed + iteration));
    std::vector<std::int64_t> written;
    auto const choose = [&](std::vector<float> const& logits) -> std::optional<std::int32_t> {
      std::int64_t token = 0;
      if (draws_) {
        auto const known = std::min(logits.size(), static_cast<std::size_t>(tokenizer_->size()));
        token = draw_token(std::span(logits).first(known), {0.8, 200, 1.0}, random);  // the defaults of `sample`
      }
      written.push_back(told_by_first(token));
      watch(static_cast<std::int64_t>(written.size()));
      return static_cast<std::int32_t>(written.back());
    };
    std::vector<std::int32_t> const start{
        static_cast<std::int32_t>(told_by_first(draws_ ? first_token(*tokenizer_) : 0))};
    if (trainer_.model().plan().sharing() < 2) {
      continue_text(trainer_.model(), start, settings_.sample_tokens, choose);
    } else {
      Whole whole{trainer_.model()};
      continue_text(whole, start, settings_.sample_tokens, choose);
    }
    return draws_ ? tokenizer_->decode(written) : std::string();
  }

 private:
  using Model = std::remove_reference_t<decltype(std::declval<T&>().model())>;
  /// A model whose layers keep no keys of their own reads the whole text for each token.
  struct Whole {
    Model& model;
    std::int64_t capacity() const { return model.capacity(); }
    std::int64_t cached() const { return 0; }
    void restart() {}
    std::vector<float> extend(std::int32_t const* tokens, std::int64_t count) { return model.logits(tokens, count); }
  };

  std::int64_t told_by_first(std::int64_t mine) {
    auto& engine = trainer_.engine();
    if (engine.world_size() == 1) return mine;
    return std::stoll(engine.world().exchange(fmt::format("{}", mine), "the next token of a sample").front());
  }

  T& trainer_;
  Settings const& settings_;
  bool draws_;
  std::shared_ptr<Tokenizer const> tokenizer_;  ///< rank 0's
};

}  // namespace transformer
