// SPDX-License-Identifier: Apache-2.0
// The loop of sampling: a model reads a text and a token is added to it, again and again.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

namespace transformer {

/// [Note: A text longer than the block]
/// A model sees at most the last `capacity` tokens of a text, at the positions from 0 on: nanoGPT's window. As long as
/// the text fits, no token changes its position, and keys and values of those that were read stay as they are: a step
/// computes one token. From then on every step moves all tokens by one position. Positions are learned, and part of
/// what keys and values were made from, in every layer; nothing of the cache is true any more, and the whole window is
/// computed again for each token, but for the logits, of which the last row alone is.
///
/// Lets a model continue a text, which is not empty, by at most `count` tokens.
/// @param model   a Gpt, or what has its capacity(), cached(), restart() and extend()
/// @param choose  std::optional<std::int32_t>(std::vector<float> const& logits): the next token, or nullopt to stop
/// @note Collective: as model.extend, once a token; all ranks stop at the same one.
template <class M, class Choose>
void continue_text(M& model, std::vector<std::int32_t> text, std::int64_t count, Choose&& choose) {
  model.restart();
  for (std::int64_t token = 0; token < count; ++token) {
    auto const length = static_cast<std::int64_t>(text.size());
    bool const fits = length <= model.capacity();
    if (!fits) model.restart();
    auto const first = fits ? model.cached() : length - model.capacity();
    std::optional<std::int32_t> const next = choose(model.extend(text.data() + first, length - first));
    if (!next) return;
    text.push_back(*next);
  }
}

}  // namespace transformer
