// SPDX-License-Identifier: Apache-2.0
#include "nanogpt/formats/gpt2/llm_c.hpp"

#include <algorithm>
#include <array>
#include <cstddef>
#include <iterator>
#include <system_error>
#include <vector>

#include "fsdp/error.hpp"
#include "fsdp/tensor.hpp"
#include "nanogpt/formats/gpt2/tensor_names.hpp"
#include "transformer/data/new_file.hpp"

namespace nanogpt {
namespace {

namespace fs = std::filesystem;
using fsdp::checkpoint::InputFile;

constexpr std::int32_t magic = 20240326, version_fp32 = 3, version_bf16 = 5;
using Words = std::array<std::int32_t, 256>;
constexpr std::int64_t header_bytes = sizeof(Words);
constexpr std::int64_t vocab_multiple = 128;

/// All tensors in the file's order: the tables, then each of a layer's for all layers, the last norm.
std::vector<GptTensor> in_file_order(GptConfig config) {
  config.bias = true;
  auto const tensors = gpt_tensors(config);  // layer by layer
  constexpr std::size_t tables = 2, norm = 2;
  auto const layers = static_cast<std::size_t>(config.n_layer);
  auto const of_layer = (tensors.size() - tables - norm) / layers;
  std::vector<GptTensor> list(tensors.begin(), tensors.begin() + tables);
  for (std::size_t kind = 0; kind < of_layer; ++kind)
    for (std::size_t layer = 0; layer < layers; ++layer) list.push_back(tensors[tables + layer * of_layer + kind]);
  list.insert(list.end(), tensors.end() - norm, tensors.end());
  return list;
}

std::int64_t elements_of(GptConfig const& config, std::int64_t padded_vocab) {
  auto const padding = (padded_vocab - config.vocab_size) * config.n_embd;
  return config.parameters() + padding;
}

}  // namespace

bool is_llm_c(fs::path const& path) {
  std::error_code error;
  if (!fs::is_regular_file(path, error) || fs::file_size(path, error) < sizeof magic) return false;
  std::int32_t word = 0;
  InputFile(path).read(0, std::as_writable_bytes(std::span(&word, 1)));
  return word == magic;
}

LlmcFile::Header LlmcFile::read_header(fs::path const& path) {
  InputFile const file(path);
  auto const name = fsdp::formatted("'{}'", path.string());
  if (file.size() < header_bytes)
    fsdp::fail<fsdp::ConfigError>("{}: the file has {} bytes, fewer than the {} bytes of llm.c's header", name,
                                  file.size(), header_bytes);
  Words words{};
  file.read(0, std::as_writable_bytes(std::span(words)));
  if (words[0] != magic)
    fsdp::fail<fsdp::ConfigError>("{}: expected a checkpoint of llm.c's, which begins with {}, got {}", name, magic,
                                  words[0]);
  if (words[1] != version_fp32 && words[1] != version_bf16)
    fsdp::fail<fsdp::ConfigError>("{}: expected llm.c's version {} (fp32) or {} (bf16), got {}", name, version_fp32,
                                  version_bf16, words[1]);
  Header header;
  header.element_bytes = words[1] == version_fp32 ? 4 : 2;
  auto& config = header.config;
  config.block_size = words[2];
  config.vocab_size = words[3];
  config.n_layer = words[4];
  config.n_head = words[5];
  config.n_embd = words[6];
  config.bias = true;
  config.activation = Activation::gelu_new;
  header.padded_vocab = words[7];
  expect_possible(config, name);
  auto padded = config;
  padded.vocab_size = header.padded_vocab;
  expect_possible(padded, name);
  if (header.padded_vocab < config.vocab_size)
    fsdp::fail<fsdp::ConfigError>(
        "{}: the header's padded vocabulary size, {}, is smaller than its vocabulary size, {}", name,
        header.padded_vocab, config.vocab_size);
  auto const expected = header_bytes + elements_of(config, header.padded_vocab) * header.element_bytes;
  if (file.size() != expected)
    fsdp::fail<fsdp::ConfigError>("{}: expected {} bytes by its header, but the file has {}: {}", name, expected,
                                  file.size(),
                                  file.size() < expected ? "it is truncated" : "there are bytes after the weights");
  return header;
}

LlmcFile::LlmcFile(fs::path const& path) : LlmcFile(path, read_header(path)) {}

LlmcFile::LlmcFile(fs::path const& path, Header const& header)
    : WeightsSource(path), config_(header.config), file_(path), element_bytes_(header.element_bytes) {
  std::int64_t first = 0;
  for (auto const& tensor : in_file_order(config())) {
    places_.emplace(tensor.name, Place{first, tensor.numel()});
    first += tensor.name == token_table ? header.padded_vocab * config().n_embd : tensor.numel();
  }
}

void LlmcFile::read(std::string_view name, std::int64_t first, std::span<float> out) const {
  auto const found = places_.find(name);
  FSDP_EXPECTS(found != places_.end(), "'{}': there is no tensor '{}'", path().string(), name);
  auto const& place = found->second;
  FSDP_EXPECTS(first >= 0 && first + static_cast<std::int64_t>(out.size()) <= place.count,
               "'{}': elements {} to {} are read of tensor '{}', which has {}", path().string(), first,
               first + static_cast<std::int64_t>(out.size()), name, place.count);
  auto at = header_bytes + (place.first + first) * element_bytes_;
  if (element_bytes_ == 4) return file_.read(at, std::as_writable_bytes(out));
  std::array<fsdp::bf16, 8192> block;
  while (!out.empty()) {
    auto const count = std::min(out.size(), block.size());
    auto const part = std::span(block).first(count);
    file_.read(at, std::as_writable_bytes(part));
    std::transform(part.begin(), part.end(), out.begin(), [](fsdp::bf16 value) { return static_cast<float>(value); });
    at += static_cast<std::int64_t>(part.size_bytes());
    out = out.subspan(count);
  }
}

void write_llm_c(fs::path const& path, GptConfig const& config, WeightsSource const& weights, bool bf16,
                 std::function<void()> const& before_name) {
  auto const padded = (config.vocab_size + vocab_multiple - 1) / vocab_multiple * vocab_multiple;
  Words words{};
  std::int64_t const head[] = {magic,
                               bf16 ? version_bf16 : version_fp32,
                               config.block_size,
                               config.vocab_size,
                               config.n_layer,
                               config.n_head,
                               config.n_embd,
                               padded};
  for (std::size_t i = 0; i < std::size(head); ++i) words[i] = static_cast<std::int32_t>(head[i]);
  NewFile file(path);
  auto const write = [&](auto const& elements) {
    file.write({reinterpret_cast<char const*>(elements.data()), elements.size() * sizeof elements[0]});
  };
  write(words);
  std::vector<float> values;
  std::vector<fsdp::bf16> rounded;
  for (auto const& tensor : in_file_order(config)) {
    auto const own = static_cast<std::size_t>(tensor.numel());
    values.assign(tensor.name == token_table ? static_cast<std::size_t>(padded * config.n_embd) : own, 0.0f);
    if (config.bias || !tensor.is_bias()) weights.read(tensor.name, 0, std::span(values).first(own));
    if (bf16) {
      rounded.resize(values.size());
      std::transform(values.begin(), values.end(), rounded.begin(), [](float value) { return fsdp::bf16(value); });
      write(rounded);
    } else {
      write(values);
    }
  }
  file.finish();
  before_name();
  file.commit();
}

}  // namespace nanogpt
