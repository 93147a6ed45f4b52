// SPDX-License-Identifier: Apache-2.0
#include "llama/formats/generation_config.hpp"

#include <array>
#include <filesystem>
#include <string_view>
#include <system_error>
#include <utility>

#include "fsdp/error.hpp"
#include "fsdp/files.hpp"
#include "fsdp/json.hpp"
#include "transformer/weights/config_fields.hpp"

namespace llama {
namespace {

namespace fs = std::filesystem;
using fsdp::checkpoint::Json;

constexpr std::int64_t longest_generation_config = 1 << 20;  // bytes

// Keys without effect on sample: those that it has settings of its own for, and how transformers computes and returns.
constexpr std::array keys_of_sample = std::to_array<std::string_view>({
    // clang-format off
    "eos_token_id", "bos_token_id", "pad_token_id", "decoder_start_token_id", "do_sample", "temperature", "top_k",
    "top_p", "max_length", "max_new_tokens", "max_time", "num_return_sequences", "use_cache", "cache_implementation",
    "cache_config", "return_legacy_cache", "return_dict_in_generate", "output_attentions", "output_hidden_states",
    "output_scores", "output_logits", "transformers_version", "_from_model_config", "_commit_hash", "length_penalty",
    "early_stopping", "low_memory", "compile_config", "disable_compile", "prefill_chunk_size",
    "assistant_confidence_threshold", "assistant_early_exit", "assistant_lookbehind", "num_assistant_tokens",
    "num_assistant_tokens_schedule", "target_lookbehind", "max_matching_ngram_size", "remove_invalid_values",
    "renormalize_logits", "is_assistant"
    // clang-format on
});
// Keys that must have the value with which transformers chooses tokens by temperature, top_k and top_p alone.
std::array const keys_with_defaults = std::to_array<std::pair<char const*, Json>>({{"repetition_penalty", 1.0},
                                                                                   {"encoder_repetition_penalty", 1.0},
                                                                                   {"no_repeat_ngram_size", 0},
                                                                                   {"encoder_no_repeat_ngram_size", 0},
                                                                                   {"min_length", 0},
                                                                                   {"min_new_tokens", 0},
                                                                                   {"min_p", 0.0},
                                                                                   {"num_beams", 1},
                                                                                   {"num_beam_groups", 1},
                                                                                   {"diversity_penalty", 0.0},
                                                                                   {"typical_p", 1.0},
                                                                                   {"epsilon_cutoff", 0.0},
                                                                                   {"eta_cutoff", 0.0},
                                                                                   {"guidance_scale", 1.0},
                                                                                   {"token_healing", false}});

/// The ids of eos_token_id, a number or several.
std::vector<std::int64_t> end_ids(ConfigFields const& json, std::int64_t vocab_size) {
  std::vector<std::int64_t> ids;
  if (!json.has("eos_token_id")) return ids;
  auto const& value = json.json()["eos_token_id"];
  for (auto const& id : value.is_array() ? value : Json::array({value})) {
    if (!id.is_number_integer() || id < 0 || id >= vocab_size)
      json.wrong("eos_token_id", fsdp::formatted("ids from 0 to {}", vocab_size - 1));
    ids.push_back(id.get<std::int64_t>());
  }
  return ids;
}

}  // namespace

std::vector<std::int64_t> ids_that_end_texts(OpenedLlama const& model) {
  std::error_code error;
  for (auto const* const name : {"generation_config.json", "config.json"})
    for (auto const& folder : {model.tokenizer, model.original}) {
      auto const path = folder / name;
      if (folder.empty() || !fs::is_regular_file(path, error)) continue;
      auto const what = fsdp::formatted("'{}'", path.string());
      auto const object =
          fsdp::checkpoint::parse_object(fsdp::checkpoint::read_text_file(path, longest_generation_config), what);
      ConfigFields const json(object, what);
      if (std::string_view(name) != "config.json") {
        std::vector<std::string_view> with_defaults;
        for (auto const& [key, value] : keys_with_defaults) {
          json.expect(key, value);
          with_defaults.emplace_back(key);
        }
        json.expect_known({keys_of_sample, with_defaults});
      }
      return end_ids(json, model.config.vocab_size);
    }
  return {};
}

}  // namespace llama
