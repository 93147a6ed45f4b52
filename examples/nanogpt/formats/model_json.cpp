// SPDX-License-Identifier: Apache-2.0
#include "nanogpt/formats/model_json.hpp"

#include <limits>
#include <string>

#include "fsdp/json.hpp"
#include "nanogpt/formats/gpt2/tensor_names.hpp"

namespace nanogpt {

nlohmann::ordered_json model_json(GptConfig const& config) {
  return {{"n_layer", config.n_layer},
          {"n_head", config.n_head},
          {"n_embd", config.n_embd},
          {"block_size", config.block_size},
          {"vocab_size", config.vocab_size},
          {"bias", config.bias},
          {"activation", name(config.activation)}};
}

GptConfig shape_from(fsdp::checkpoint::Fields const& fields, char const* positions) {
  constexpr auto most = std::numeric_limits<std::int64_t>::max();
  GptConfig config;
  config.n_layer = fields.whole("n_layer", 1, most);
  config.n_head = fields.whole("n_head", 1, most);
  config.n_embd = fields.whole("n_embd", 1, most);
  config.block_size = fields.whole(positions, 1, most);
  config.vocab_size = fields.whole("vocab_size", 1, most);
  return config;
}

GptConfig model_from(nlohmann::ordered_json const& object, std::string_view what) {
  fsdp::checkpoint::Fields const fields(object, what);
  GptConfig config = shape_from(fields, "block_size");
  config.bias = fields.flag("bias");
  if (fields.has("activation")) config.activation = activation_named(fields.text("activation"), what);
  expect_possible(config, std::string(what));
  config.validate();
  return config;
}

}  // namespace nanogpt
