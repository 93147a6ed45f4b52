// SPDX-License-Identifier: Apache-2.0
// Weights in safetensors files: HuggingFace's, in one file or several, and our own.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "gpt2/tensor_names.hpp"
#include "gpt2/weights_source.hpp"

namespace fsdp::checkpoint {
class SafetensorsFile;
}

namespace nanogpt {

/// How a file has the weights of linear layers.
enum class Orientation {
  out_in,  ///< ours
  in_out   ///< HuggingFace's Conv1D
};

/// A folder's model.safetensors, or the files that its model.safetensors.index.json names. Types F32, BF16 and F16.
class WeightsFolder final : public WeightsSource {
 public:
  /// Opens and checks all files; of the tensors' values it reads at most wte and lm_head, to compare them.
  /// @param config  the folder's model
  /// @throws fsdp::ConfigError naming what is missing, of another shape or type, unknown, or not tied
  WeightsFolder(std::filesystem::path const& folder, GptConfig const& config, Orientation orientation);
  ~WeightsFolder() override;

  /// [Note: Reading a transposed weight] A range of our rows is a run in each of their rows. These runs are read in
  /// bands, through a block of 260 KiB, whatever the tensor's size. A rank touches no more of the file than its runs:
  /// with runs shorter than a page (1024 fp32) it touches every page of the tensor, which ranks of a machine share.
  void read(std::string_view name, std::int64_t first, std::span<float> out) const override;

 private:
  using File = fsdp::checkpoint::SafetensorsFile;
  struct Place {
    std::size_t file = 0;
    std::string name;  ///< in the file
  };
  struct Stored {
    GptTensor tensor;
    Place place;
  };

  void open_files();
  std::map<std::string, std::string> read_index(std::filesystem::path const& path) const;
  void find_tensors(std::map<std::string, std::string> const& index);
  void check_tensors(Orientation orientation);
  void expect_tied(Place const& head) const;
  void read_transposed(Stored const& stored, std::int64_t first, std::span<float> out) const;

  std::vector<std::string> names_;  ///< of the files
  std::vector<std::unique_ptr<File>> files_;
  std::map<std::string, Place, std::less<>> places_;    ///< by our name, before they are checked
  std::map<std::string, Stored, std::less<>> tensors_;  ///< by our name
};

}  // namespace nanogpt
