// SPDX-License-Identifier: Apache-2.0
#include "nanogpt/formats/start.hpp"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <string_view>
#include <utility>

#include "fsdp/error.hpp"
#include "fsdp/json.hpp"
#include "nanogpt/formats/gpt2/config_json.hpp"
#include "nanogpt/formats/model_json.hpp"
#include "transformer/run/choices.hpp"
#include "transformer/training/folder.hpp"

namespace nanogpt {
namespace {

/// @param from  where the model comes from, for the message
void adopt_shape(Settings& settings, GptConfig const& model, std::string_view from) {
  auto const adopt = [&](std::string_view name, auto& setting, auto const& saved) {
    if (settings.was_given(name) && setting != saved)
      fsdp::fail<fsdp::ConfigError>("setting '{}': {} contradicts the model of {}, which has {}; leave the setting out",
                                    name, setting, from, saved);
    setting = saved;
  };
  adopt("n_layer", settings.n_layer, model.n_layer);
  adopt("n_head", settings.n_head, model.n_head);
  adopt("n_embd", settings.n_embd, model.n_embd);
  adopt("block_size", settings.block_size, model.block_size);
  adopt("bias", settings.bias, model.bias);
}

}  // namespace

GptConfig model_config(Settings const& settings, std::int64_t vocab_size) {
  GptConfig config;
  config.n_layer = settings.n_layer;
  config.n_head = settings.n_head;
  config.n_embd = settings.n_embd;
  config.block_size = settings.block_size;
  config.vocab_size = vocab_size;
  config.dropout = static_cast<float>(settings.dropout);
  config.bias = settings.bias;
  config.validate();
  return config;
}

GptConfig model_config(RunState const& run) {
  return model_from(fsdp::checkpoint::parse_json(run.model), run.checkpoint.string());
}

std::string model_text(GptConfig const& config) { return model_json(config).dump(); }

void adopt_model(Settings& settings, RunState const& run) {
  adopt_shape(settings, model_config(run), fsdp::formatted("the checkpoint '{}'", run.checkpoint.string()));
}

void adopt_model(Settings& settings, OpenedModel const& opened) {
  auto model = opened.config;
  if (settings.was_given("block_size")) model.block_size = std::min(model.block_size, settings.block_size);
  adopt_shape(settings, model, fsdp::formatted("the weights '{}'", opened.path().string()));
}

SampleRequest<OpenedModel> read_sample_request(Settings const& settings, std::int64_t ranks) {
  check_together(settings, Command::sample, ranks);
  SampleRequest<OpenedModel> request;
  if (settings.init_from == "resume") {
    auto opened = open_run(settings);
    request.model = std::move(opened.model);
    request.note = std::move(opened.note);
  } else {
    request.model = open_pretrained(settings);
  }
  auto tokenizer = open_tokenizer(request.model, settings);
  if (tokenizer == nullptr)
    fsdp::fail<fsdp::ConfigError>(
        "'{}' has weights but no vocabulary (vocab.json and merges.txt, tokenizer.json, or a meta.json with 'itos' or "
        "'tokenizer'), so "
        "no text can be printed; name GPT-2's files with --encoder_json=FILE and --vocab_bpe=FILE",
        request.model.path().string());
  request.text = read_sample_text(settings, std::move(tokenizer));
  return request;
}

}  // namespace nanogpt

// Functions that examples/transformer declares and each program defines.
namespace transformer {

std::string checked_model(nlohmann::ordered_json const& model, std::string_view what) {
  return nanogpt::model_text(nanogpt::model_from(model, what));
}

bool is_own_config(std::filesystem::path const& config) {
  return nanogpt::kind_of_config(config) == nanogpt::ConfigKind::nanogpt;
}

}  // namespace transformer
