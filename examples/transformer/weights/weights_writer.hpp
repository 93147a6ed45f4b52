// SPDX-License-Identifier: Apache-2.0
// Writes a model's weights into safetensors files, tensor by tensor.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "fsdp/layout.hpp"
#include "fsdp/tensor.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE::checkpoint {
class SafetensorsWriter;
}

namespace transformer {

/// Where weights are written to, and in how large files.
struct WeightsPlace {
  std::filesystem::path path;  ///< "model.safetensors" in its folder
  /// Bytes of tensors in a file. If there are more, the files are model-00001-of-0000N.safetensors and so on, and
  /// model.safetensors.index.json says which has what, as HuggingFace's do. A larger tensor has a file of its own.
  std::int64_t largest = INT64_MAX;

  WeightsPlace(std::filesystem::path file, std::int64_t most = INT64_MAX) : path(std::move(file)), largest(most) {}
};

/// Writes weights in the order of the tensors. It is compiled apart from the engines, because writing JSON takes long
/// to compile.
class WeightsWriter {
 public:
  /// A tensor to be written. dtype: f32, bf16 or f16.
  struct Tensor {
    std::string name;
    std::vector<std::int64_t> shape;
    fsdp::DType dtype = fsdp::DType::f32;
  };

  /// @throws fsdp::ResourceError if a file cannot be made
  WeightsWriter(WeightsPlace const& place, std::vector<Tensor> const& tensors);
  /// One file. @param bf16  all tensors are bf16; else fp32
  WeightsWriter(std::filesystem::path const& path, std::vector<fsdp::TensorInfo> const& tensors, bool bf16 = false);
  WeightsWriter(WeightsWriter const&) = delete;
  WeightsWriter& operator=(WeightsWriter const&) = delete;
  ~WeightsWriter();

  /// Writes the next tensor, rounded to nearest even where its type is narrower.
  void write(std::string const& name, std::span<float const> values);
  /// Writes the next tensor, whose values are bf16 already: their bits stay if its type is bf16.
  void write(std::string const& name, std::span<fsdp::bf16 const> values);
  void write(fsdp::TensorInfo const& tensor, std::span<float const> values) { write(tensor.name, values); }

  /// All tensors are written: the files get their names. Several files: an index and a model.safetensors that were
  /// there before are removed first, for readers would take them; the new index comes last.
  /// @throws fsdp::ResourceError if the disk refuses; UsageError if tensors are missing
  void finish();

 private:
  using File = fsdp::checkpoint::SafetensorsWriter;

  template <class From>
  void write_next(std::string const& name, std::span<From const> values);

  std::filesystem::path path_;
  std::vector<std::unique_ptr<File>> files_;
  std::vector<fsdp::DType> types_;   ///< of the tensors
  std::vector<std::size_t> places_;  ///< numbers of the files that the tensors are in
  std::size_t written_ = 0;          ///< tensors
  std::string index_;                ///< text of the index, if there are several files
};

}  // namespace transformer
