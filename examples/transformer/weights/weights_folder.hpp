// SPDX-License-Identifier: Apache-2.0
// Weights in safetensors files, in one or several, as HuggingFace names them.
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

#include "fsdp/tensor.hpp"
#include "transformer/weights/tensor_list.hpp"
#include "transformer/weights/weights_source.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE::checkpoint {
class SafetensorsFile;
}

namespace transformer {

/// A folder's model.safetensors, or the files that its model.safetensors.index.json names. Types F32, BF16 and F16.
class WeightsFolder final : public WeightsSource {
 public:
  /// Opens and checks all files; of the tensors' values it reads at most those that are tied, to compare them.
  /// @param list  the tensors of the folder's model
  /// @throws fsdp::ConfigError naming what is missing, of another shape or type, unknown, or not tied
  WeightsFolder(std::filesystem::path const& folder, TensorList const& list);
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
    WeightTensor tensor;
    Place place;
  };

  void open_files(TensorList const& list);
  std::map<std::string, std::string> read_index(std::filesystem::path const& path) const;
  void find_tensors(TensorList const& list, std::map<std::string, std::string> const& index);
  void check_tensors(TensorList const& list);
  void expect_equal(TiedName const& tied, Place const& other) const;
  Stored const& find(std::string_view name) const;
  void read_transposed(Stored const& stored, std::int64_t first, std::span<float> out) const;

  std::vector<std::string> names_;  ///< of the files
  std::vector<std::unique_ptr<File>> files_;
  std::map<std::string, Place, std::less<>> places_;    ///< by our name, before they are checked
  std::map<std::string, Stored, std::less<>> tensors_;  ///< by our name
};

}  // namespace transformer
