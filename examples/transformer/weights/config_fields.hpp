// SPDX-License-Identifier: Apache-2.0
// Reads the JSON that HuggingFace's libraries write: config.json, adapter_config.json, generation_config.json.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <initializer_list>
#include <span>
#include <string>
#include <string_view>

#include "fsdp/error.hpp"
#include "fsdp/json.hpp"

namespace transformer {

/// The keys of an object. A key whose value is null counts as missing: HuggingFace's libraries then take their default.
class ConfigFields {
 public:
  using Json = fsdp::checkpoint::Json;
  using Names = std::span<std::string_view const>;

  /// @param object  lives as long as this, and so does `what`
  /// @param what    the file's name for messages: "'path'"
  ConfigFields(Json const& object, std::string_view what) : json_(object), fields_(object, what), what_(what) {}

  std::string_view what() const { return what_; }
  Json const& json() const { return json_; }
  /// Reads keys of the object; its functions refuse null.
  fsdp::checkpoint::Fields const& fields() const { return fields_; }

  bool has(char const* name) const { return json_.contains(name) && !json_[name].is_null(); }
  /// A whole number from 1 to 10^9.
  std::int64_t count(char const* name) const { return fields_.whole(name, 1, 1'000'000'000); }
  std::int64_t count(char const* name, std::int64_t otherwise) const { return has(name) ? count(name) : otherwise; }
  double number(char const* name) const {
    if (!fields_.at(name).is_number()) fields_.wrong(name, "a number");
    return fields_.number(name);
  }
  double number(char const* name, double otherwise) const { return has(name) ? number(name) : otherwise; }
  bool flag(char const* name, bool otherwise) const { return has(name) ? fields_.flag(name) : otherwise; }

  /// @throws fsdp::ConfigError unless the key is missing, or has the only value that is supported
  void expect(char const* name, Json const& only) const {
    if (has(name) && json_[name] != only) wrong(name, only.dump() + ", the only value that is supported");
  }
  /// @throws fsdp::ConfigError unless the key is missing, or its value is an empty object or array
  void expect_none(char const* name) const {
    if (has(name) && !is_empty(json_[name])) wrong(name, "none");
  }
  /// @param known  the keys that are read, and those that have no effect on what is computed
  /// @throws fsdp::ConfigError naming the first other key that has a value
  void expect_known(std::initializer_list<Names> known) const {
    for (auto const& item : json_.items()) {
      bool const listed = std::any_of(known.begin(), known.end(), [&](Names names) {
        return std::find(names.begin(), names.end(), item.key()) != names.end();
      });
      if (!listed && !item.value().is_null())
        wrong(item.key().c_str(), "supported keys only (remove this one if the model does not need it)");
    }
  }
  [[noreturn]] void wrong(char const* name, std::string_view expected) const { fields_.wrong(name, expected); }

 private:
  static bool is_empty(Json const& value) { return value.is_structured() && value.empty(); }

  Json const& json_;
  fsdp::checkpoint::Fields fields_;
  std::string_view what_;
};

/// Keys of any model's config.json that change nothing of what the model computes: names and versions, classes for
/// other tasks, what is returned, and settings of generation, which older versions of transformers kept there.
inline constexpr std::array keys_without_effect = std::to_array<std::string_view>({
    // clang-format off
    "_attn_implementation", "_attn_implementation_autoset", "_commit_hash", "_flash_attn_2_enabled", "_name_or_path",
    "architectures", "attn_implementation", "bad_words_ids", "begin_suppress_tokens", "bos_token_id",
    "chunk_size_feed_forward", "cross_attention_hidden_size", "decoder_start_token_id", "diversity_penalty",
    "do_sample", "dtype", "early_stopping", "encoder_no_repeat_ngram_size", "eos_token_id",
    "exponential_decay_length_penalty", "finetuning_task", "forced_bos_token_id", "forced_eos_token_id", "id2label",
    "initializer_range", "is_decoder", "label2id", "length_penalty", "max_length", "max_new_tokens", "min_length",
    "no_repeat_ngram_size", "num_beam_groups", "num_beams", "num_labels", "num_return_sequences",
    "output_attentions", "output_hidden_states", "output_scores", "pad_token_id", "prefix", "problem_type",
    "remove_invalid_values", "repetition_penalty", "return_dict", "return_dict_in_generate", "sep_token_id",
    "suppress_tokens", "task_specific_params", "temperature", "tf_legacy_loss", "tie_encoder_decoder",
    "tokenizer_class", "top_k", "top_p", "torch_dtype", "torchscript", "transformers.js_config",
    "transformers_version", "typical_p", "unsloth_fixed", "unsloth_version", "use_bfloat16", "use_cache",
    // clang-format on
});

/// Refuses values of any model's config.json with which transformers computes something else.
inline void expect_plain_model(ConfigFields const& config) {
  for (auto const* const name : {"quantization_config", "pruned_heads", "auto_map"}) config.expect_none(name);
  for (auto const* const name : {"is_encoder_decoder", "add_cross_attention"}) config.expect(name, false);
}
inline constexpr std::array keys_of_plain_models = std::to_array<std::string_view>(
    {"quantization_config", "pruned_heads", "auto_map", "is_encoder_decoder", "add_cross_attention"});

}  // namespace transformer
