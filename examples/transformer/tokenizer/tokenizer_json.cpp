// SPDX-License-Identifier: Apache-2.0
// Reads HuggingFace's tokenizer.json.
#include "transformer/tokenizer/tokenizer_json.hpp"

#include <array>
#include <cstdint>
#include <utility>
#include <vector>

#include "transformer/tokenizer/byte_alphabet.hpp"
#include "transformer/tokenizer/byte_pair.hpp"
#include "transformer/tokenizer/json_field.hpp"
#include "transformer/tokenizer/sentence_piece.hpp"
#include "transformer/tokenizer/token_list.hpp"
#include "transformer/tokenizer/utf8.hpp"

namespace transformer {
namespace {

using Json = nlohmann::json;

constexpr std::string_view llama3_pattern = R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|)"
                                            R"( ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";

/// The steps of a normalizer, pre-tokenizer, decoder or post-processor, of which a Sequence has several.
std::vector<JsonField> steps_of(JsonField const& field, std::string const& name_in_sequence) {
  if (field.none()) return {};
  if (field.type() != "Sequence") return {field};
  field.expect_fields({"type", name_in_sequence});
  return field[name_in_sequence].elements();
}

/// Reads model.merges, whose elements are "left right" or ["left", "right"].
std::vector<std::array<Merges::Id, 3>> read_merges(JsonField const& field, TokenList const& tokens) {
  std::vector<std::array<Merges::Id, 3>> merges;
  if (!field.value().is_array()) field.wrong("an array of pairs of tokens");
  for (auto const& element : field.value()) {
    auto const wrong = [&](std::string_view expected) {
      JsonField(element, tokens.what(), fsdp::formatted("model.merges[{}]", merges.size())).wrong(expected);
    };
    std::string left, right;
    if (element.is_string()) {
      auto const& text = element.get_ref<std::string const&>();
      auto const blank = text.find(' ');
      if (blank == std::string::npos || text.find(' ', blank + 1) != std::string::npos)
        wrong("two tokens with a blank between them");
      left = text.substr(0, blank);
      right = text.substr(blank + 1);
    } else if (element.is_array() && element.size() == 2 && element[0].is_string() && element[1].is_string()) {
      left = element[0].get<std::string>();
      right = element[1].get<std::string>();
    } else {
      wrong("two tokens");
    }
    auto const left_id = tokens.find(left), right_id = tokens.find(right), merged = tokens.find(left + right);
    if (!left_id || !right_id || !merged || left.empty() || right.empty())
      wrong("two tokens of model.vocab that are a third one together");
    merges.push_back({*left_id, *right_id, *merged});
  }
  return merges;
}

class TokenizerJsonReader {
 public:
  TokenizerJsonReader(Json const& json, std::string_view what, TokenizerConfig const& config)
      : file_(json, what), model_(file_["model"]), config_(config), what_(what) {}

  std::unique_ptr<Tokenizer> read() {
    file_.expect_fields({"version", "truncation", "padding", "added_tokens", "normalizer", "pre_tokenizer",
                         "post_processor", "decoder", "model"});
    if (!file_["version"].none()) file_["version"].expect("1.0");
    if (model_.type() != "BPE") model_["type"].wrong("\"BPE\"");
    model_.expect_fields({"type", "dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix", "fuse_unk",
                          "byte_fallback", "ignore_merges", "vocab", "merges"});
    model_["dropout"].expect(nullptr);
    for (auto const* const name : {"continuing_subword_prefix", "end_of_word_suffix"})
      if (!model_[name].is("")) model_[name].expect(nullptr);
    TokenList const tokens(model_["vocab"], file_["added_tokens"], config_, what_);
    read_post_processor(tokens);
    if (model_["byte_fallback"].flag(false)) return read_pieces(tokens);
    return read_byte_pairs(tokens);
  }

 private:
  /// Finds the tokens that the file puts around a text. Each step puts its own around those of the steps before it.
  void read_post_processor(TokenList const& tokens) {
    for (auto const& step : steps_of(file_["post_processor"], "processors")) {
      auto const& type = step.type();
      if (type == "ByteLevel") continue;  // of offsets alone
      if (type != "TemplateProcessing") step["type"].wrong("\"TemplateProcessing\" or \"ByteLevel\"");
      step.expect_fields({"type", "single", "pair", "special_tokens"});
      TextTemplate around;
      bool behind = false;
      for (auto const& part : step["single"].elements()) {
        auto const marker = part["SpecialToken"];
        if (marker.none() && (behind || !part["Sequence"]["id"].is("A")))
          part.wrong("one Sequence \"A\", and SpecialTokens");
        behind = behind || marker.none();
        if (marker.none()) continue;
        auto& side = behind ? around.after : around.before;
        auto const ids = ids_of_template(step, marker["id"], tokens);
        side.insert(side.end(), ids.begin(), ids.end());
      }
      if (!behind) step["single"].wrong("one Sequence \"A\", and SpecialTokens");
      around_.before.insert(around_.before.begin(), around.before.begin(), around.before.end());
      around_.after.insert(around_.after.end(), around.after.begin(), around.after.end());
    }
  }
  /// The ids of a special token of a template: those that the template lists for it.
  static std::vector<std::int64_t> ids_of_template(JsonField const& step, JsonField const& marker,
                                                   TokenList const& tokens) {
    auto const listed = step["special_tokens"][marker.text()]["ids"];
    if (listed.none()) marker.wrong("a name in special_tokens, which lists its ids");
    std::vector<std::int64_t> ids;
    for (auto const& id : listed.elements()) {
      if (!id.value().is_number_integer() || id.value() < 0 || id.value() >= tokens.texts().size())
        id.wrong("the id of a token");
      ids.push_back(id.value().get<std::int64_t>());
    }
    return ids;
  }
  /// The template of the file, unless tokenizer_config.json says otherwise.
  TextTemplate text_template(TokenList const& tokens) const {
    auto around = around_;
    auto const set = [&](std::vector<std::int64_t>& side, std::optional<bool> adds,
                         std::optional<NamedToken> const& token, std::string_view flag) {
      if (!adds) return;
      if (*adds && !token && side.empty())
        fsdp::fail<fsdp::ConfigError>("{}: {}: expected false, for no token is named for it; got true", config_.where,
                                      flag);
      if (*adds && token) side = {*tokens.special(token->text)};
      if (!*adds) side.clear();
    };
    set(around.before, config_.adds_begin, config_.begin, "add_bos_token");
    set(around.after, config_.adds_end, config_.end, "add_eos_token");
    return around;
  }
  static std::optional<std::int64_t> end_of_text(TokenList const& tokens, TokenizerConfig const& config) {
    if (config.end) return tokens.special(config.end->text);
    for (auto const marker : {std::string_view("</s>"), end_of_text_marker, std::string_view("<|end_of_text|>")})
      if (auto const id = tokens.special(std::string(marker))) return id;
    return std::nullopt;
  }

  // Over characters.

  std::unique_ptr<Tokenizer> read_pieces(TokenList const& tokens) {
    model_["ignore_merges"].expect_flag(false, false);
    SentencePieceModel model;
    model.byte_fallback = true;
    read_blanks(model);
    auto const& unknown = model_["unk_token"];
    for (auto const& text : tokens.texts()) {
      if (text.empty()) model_["vocab"].wrong("tokens with a text");
      auto const kind = byte_of_piece(text) ? PieceKind::byte : PieceKind::normal;
      model.pieces.push_back({text, 0, unknown.is(text) ? PieceKind::unknown : kind});
    }
    for (auto const& [marker, id] : tokens.special()) {
      if (count_characters(marker) < 2) file_["added_tokens"].wrong("tokens of two characters or more");
      auto& kind = model.pieces[static_cast<std::size_t>(id)].kind;
      if (kind == PieceKind::normal) kind = PieceKind::control;
    }
    for (auto const id : tokens.not_special()) {
      auto& kind = model.pieces[static_cast<std::size_t>(id)].kind;
      if (kind == PieceKind::control) kind = PieceKind::added;
    }
    if (!file_["normalizer"].none()) expect_found_as_written();
    if (config_.adds_blank && *config_.adds_blank == (model.blank_before == BlankBefore::never))
      fsdp::fail<fsdp::ConfigError>("{}: add_prefix_space: expected {}, as {} has it", config_.where,
                                    !*config_.adds_blank, what_);
    static_cast<void>(byte_pieces(model.pieces, what_));
    model.merges = read_merges(model_["merges"], tokens);
    expect_unique(*model.merges);
    for (auto const& pair : *model.merges)
      for (auto const id : pair)
        if (model.pieces[static_cast<std::size_t>(id)].kind == PieceKind::byte)
          model_["merges"].wrong("no merges of tokens of bytes");
    model.special_tokens = tokens.special();
    model.around_text = text_template(tokens);
    model.end_of_text = end_of_text(tokens, config_);
    return std::make_unique<SentencePiece>(std::move(model));
  }

  /// A marker is found in a text before blanks are replaced.
  void expect_found_as_written() const {
    if (file_["added_tokens"].none()) return;
    for (auto const& token : file_["added_tokens"].elements())
      if (!token["special"].flag(false)) token["normalized"].expect_flag(false, false);
  }

  void read_blanks(SentencePieceModel& model) {
    std::string const blank(blank_symbol);
    Json const replaced{{"type", "Replace"}, {"pattern", {{"String", " "}}}, {"content", blank}};
    model.blank_before = BlankBefore::never;
    bool replaces = false;
    for (auto const& step : steps_of(file_["normalizer"], "normalizers")) {
      if (step.is({{"type", "Prepend"}, {"prepend", blank}}) && !replaces)
        model.blank_before = BlankBefore::always;
      else if (step.is(replaced))
        replaces = true;
      else
        step.wrong("Prepend or Replace of a blank by U+2581");
    }
    auto const words = file_["pre_tokenizer"];
    if (words.none() == !replaces) words.wrong(replaces ? "null behind a normalizer of blanks" : "\"Metaspace\"");
    if (!words.none()) read_metaspace(words, model);

    Json const back{{"type", "Replace"}, {"pattern", {{"String", blank}}}, {"content", " "}};
    auto const steps = steps_of(file_["decoder"], "decoders");
    std::vector<Json> const expected{back,
                                     {{"type", "ByteFallback"}},
                                     {{"type", "Fuse"}},
                                     {{"type", "Strip"}, {"content", " "}, {"start", 1}, {"stop", 0}}};
    if (steps.size() < 3 || steps.size() > 4)
      file_["decoder"].wrong("a Sequence of Replace, ByteFallback, Fuse and perhaps Strip");
    for (std::size_t i = 0; i < steps.size(); ++i) steps[i].expect(expected[i]);
    model.drops_first_blank = steps.size() == 4;
  }

  static void read_metaspace(JsonField const& words, SentencePieceModel& model) {
    if (words.type() != "Metaspace") words["type"].wrong("\"Metaspace\"");
    words.expect_fields({"type", "replacement", "prepend_scheme", "split", "add_prefix_space"});
    words["replacement"].expect(std::string(blank_symbol));
    auto const scheme = words["prepend_scheme"];
    if (!scheme.is("always") && !scheme.is("first") && !scheme.is("never"))
      scheme.wrong("\"always\", \"first\" or \"never\"");
    if (!scheme.is("never")) model.blank_before = BlankBefore::unless_there;
    if (!words["add_prefix_space"].none()) words["add_prefix_space"].expect(!scheme.is("never"));
    model.blank_behind_markers = scheme.is("always");
    model.splits_before_blanks = words["split"].flag(true);
  }

  // Over bytes.

  std::unique_ptr<Tokenizer> read_byte_pairs(TokenList const& tokens) {
    BytePairParts parts;
    for (auto const& step : steps_of(file_["normalizer"], "normalizers")) step.wrong("null, or an empty Sequence");
    if (config_.adds_blank.value_or(false))
      fsdp::fail<fsdp::ConfigError>("{}: add_prefix_space: expected false, as {} has it, got true", config_.where,
                                    what_);
    parts.pattern = read_pattern();
    if (file_["decoder"].type() != "ByteLevel") file_["decoder"].wrong("\"ByteLevel\"");
    file_["decoder"].expect_fields({"type", "add_prefix_space", "trim_offsets", "use_regex"});  // without effect
    for (std::size_t byte = 0; auto const character : byte_alphabet()) {
      auto const id = tokens.find(encode_utf8(character));
      if (!id) model_["vocab"].wrong(fsdp::formatted("a token for each byte, but 0x{:02x} has none", byte));
      parts.byte_ids[byte++] = *id;
    }
    std::vector<bool> special(tokens.texts().size());
    for (auto const& token : tokens.special()) special[static_cast<std::size_t>(token.id)] = true;
    for (auto const& text : tokens.texts())
      parts.tokens.push_back(special[parts.tokens.size()] ? text : bytes_of_token(text, what_));
    auto const merges = read_merges(model_["merges"], tokens);
    expect_unique(merges);
    parts.merges = Merges(merges.size());
    for (auto const& [left, right, merged] : merges) parts.merges.add(left, right, merged);
    parts.whole_words = model_["ignore_merges"].flag(false);
    parts.special_tokens = tokens.special();
    parts.around_text = text_template(tokens);
    parts.end_of_text = end_of_text(tokens, config_);
    return std::make_unique<BytePair>(std::move(parts));
  }

  WordPattern read_pattern() const {
    auto const steps = steps_of(file_["pre_tokenizer"], "pretokenizers");
    if (steps.empty() || steps.size() > 2 || steps.back().type() != "ByteLevel")
      file_["pre_tokenizer"].wrong("ByteLevel, or Digits or Split and ByteLevel");
    auto const& bytes = steps.back();
    bytes.expect_fields({"type", "add_prefix_space", "trim_offsets", "use_regex"});
    bytes["add_prefix_space"].expect_flag(false, true);
    auto const& first = steps.front();
    bool const splits = steps.size() == 2 && first.type() == "Split";
    bytes["use_regex"].expect_flag(!splits, true);
    if (steps.size() == 1) return WordPattern::gpt2;
    if (splits) {
      first.expect({{"type", "Split"},
                    {"pattern", {{"Regex", std::string(llama3_pattern)}}},
                    {"behavior", "Isolated"},
                    {"invert", false}});
      return WordPattern::llama3;
    }
    first.expect({{"type", "Digits"}, {"individual_digits", true}});
    return WordPattern::gpt2_digits;
  }

  void expect_unique(std::vector<std::array<Merges::Id, 3>> const& merges) const {
    Merges seen(merges.size());
    for (std::size_t i = 0; i < merges.size(); ++i) {
      auto const [left, right, merged] = merges[i];
      if (seen.find(left, right).rank != Merges::no_rank)
        JsonField(model_["merges"].value()[i], what_, fsdp::formatted("model.merges[{}]", i))
            .wrong("a pair that does not occur twice");
      seen.add(left, right, merged);
    }
  }

  JsonField file_, model_;
  TokenizerConfig const& config_;
  std::string_view what_;
  TextTemplate around_;
};

}  // namespace

std::unique_ptr<Tokenizer> read_tokenizer_json(std::string_view text, std::string_view what,
                                               TokenizerConfig const& config) {
  auto const json = parse_json_object(text, what);
  return TokenizerJsonReader(json, what, config).read();
}

}  // namespace transformer
