// SPDX-License-Identifier: Apache-2.0
// llama2.c's stories260K, read from its file and from a folder of HuggingFace's, writes the text that llama2.c
// documents: on 1, 2 and 3 ranks, the prompt at once or token by token. Skipped without the data.
//
// links: llama_layers_host llama_models
// skip-sanitizers
#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "fsdp/fsdp.hpp"
#include "fsdp/full_state.hpp"
#include "fsdp/host.hpp"
#include "fsdp/local.hpp"
#include "llama/formats/config_json.hpp"
#include "llama/formats/weights.hpp"
#include "llama/instances/layers_host.hpp"
#include "llama/model.hpp"
#include "tests/catch.hpp"
#include "tests/llama/folders/stories.hpp"
#include "tests/support/temporary_folder.hpp"
#include "transformer/tokenizer/sentence_piece.hpp"
#include "transformer/tokenizer/tokenizer_folder.hpp"
#include "transformer/weights/engine_weights.hpp"
#include "transformer/weights/weights_writer.hpp"

namespace {

using Device = fsdp::host::Device;
using Comm = fsdp::local::Communicator<Device>;
using Engine = fsdp::Engine<Comm, fsdp::Fp32>;
using transformer::Tokenizer;

/// README of llama2.c, "./run stories260K/stories260K.bin -z stories260K/tok512.bin -t 0.0".
constexpr std::string_view documented =
    "Once upon a time, there was a little girl named Lily. She loved to play outside in the park. One day, she saw a "
    "big, red ball. She wanted to play with it, but it was too high.";

/// @param load  called with the engine, on each rank
/// @param at_once  the prompt is one piece; otherwise a token after the other
template <class Load>
std::string story(llama::LlamaConfig const& config, Tokenizer const& tokenizer, int ranks, bool at_once,
                  Load const& load) {
  std::string text;
  fsdp::local::run(ranks, Device{}, [&](Comm comm) {
    bool const first = comm.rank() == 0;
    fsdp::Mesh<Comm> mesh(std::move(comm));
    Engine engine(mesh, fsdp::FullShard{}, {});
    llama::DecoderOptions options;
    options.training = false;
    llama::Llama<Engine> model(engine, config, 1, 80, options);
    engine.seal();
    load(engine);
    auto ids = tokenizer.text_template().before;
    auto const prompt = tokenizer.encode("Once upon a time");
    ids.insert(ids.end(), prompt.begin(), prompt.end());
    std::vector<float> logits;
    std::vector<std::int32_t> const tokens(ids.begin(), ids.end());
    for (std::size_t i = 0; i < tokens.size(); i += at_once ? tokens.size() : 1)
      logits = model.extend(tokens.data() + i, at_once ? static_cast<std::int64_t>(tokens.size()) : 1);
    for (int written = 0; written < 64; ++written) {
      auto const next = static_cast<std::int32_t>(std::max_element(logits.begin(), logits.end()) - logits.begin());
      ids.push_back(next);
      logits = model.extend(&next, 1);
    }
    if (first) text = tokenizer.decode(ids);
  });
  return text;
}

}  // namespace

TEST_CASE("stories260K writes the documented story from its file and from a folder") {
  char const* const data = std::getenv("FSDP_TEST_DATA");
  if (data == nullptr || !std::filesystem::exists(std::filesystem::path(data) / "stories260K.bin")) {
    WARN("skipped: FSDP_TEST_DATA has no stories260K.bin");
    return;
  }
  auto const model = llama_stories::read_stories(data);
  fsdp::testing::TemporaryFolder const folder;
  std::vector<transformer::WeightsWriter::Tensor> tensors;
  for (auto const& tensor : llama::llama_tensors(model.config))
    tensors.push_back({tensor.name, tensor.shape, fsdp::DType::f32});
  transformer::WeightsWriter writer({folder.path / "model.safetensors"}, tensors);
  for (auto const& tensor : tensors) writer.write(tensor.name, model.tensors.at(tensor.name));
  writer.finish();
  std::ofstream(folder.path / "config.json") << llama::huggingface_config_text(model.config, 1, 2, "float32");
  std::ofstream(folder.path / "tokenizer.model", std::ios::binary) << model.tokenizer;

  auto const opened = llama::open_folder(folder.path);
  auto const tokenizer = transformer::open_tokenizer_folder(folder.path, opened.config.vocab_size);
  CHECK(opened.config == model.config);
  for (int const ranks : {1, 2, 3}) {
    for (bool const at_once : {true, false}) {
      INFO(ranks << " ranks, " << (at_once ? "the prompt at once" : "token by token"));
      CHECK(story(opened.config, *tokenizer, ranks, at_once, [&](Engine& engine) {
              transformer::load_weights(engine, *opened.weights);
            }).starts_with(documented));
      CHECK(story(model.config, *tokenizer, ranks, at_once, [&](Engine& engine) {
              fsdp::import_shard(engine, [&](fsdp::TensorInfo const& tensor, std::int64_t at, std::span<float> out) {
                auto const& values = model.tensors.at(tensor.name);
                std::copy_n(values.begin() + at, out.size(), out.begin());
                return true;
              });
            }).starts_with(documented));
    }
  }
}
