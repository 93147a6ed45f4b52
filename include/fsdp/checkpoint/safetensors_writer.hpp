// SPDX-License-Identifier: Apache-2.0
// The safetensors file format: a writer that streams.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

#include "fsdp/checkpoint/files.hpp"
#include "fsdp/checkpoint/safetensors_header.hpp"
#include "fsdp/error.hpp"
#include "fsdp/tensor.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE::checkpoint {

/// Writes a safetensors file tensor by tensor, in the order of `entries`. The file appears under its name only when
/// `finish` has run; until then it is `path` + ".tmp", which the destructor removes.
class SafetensorsWriter {
 public:
  /// @param metadata  texts for the header's "__metadata__"
  /// @throws ResourceError if the file cannot be created; UsageError if a name occurs twice
  SafetensorsWriter(std::filesystem::path path, std::vector<TensorEntry> entries,
                    std::map<std::string, std::string> const& metadata = {})
      : path_(std::move(path)), temporary_(path_.string() + ".tmp"), entries_(std::move(entries)) {
    auto const header = safetensors_header(entries_, metadata, path_.string());
    file_.emplace(temporary_);
    file_->write(header);
  }
  SafetensorsWriter(SafetensorsWriter const&) = delete;
  SafetensorsWriter& operator=(SafetensorsWriter const&) = delete;
  ~SafetensorsWriter() {
    if (!file_) return;
    file_.reset();
    std::error_code ignored;
    std::filesystem::remove(temporary_, ignored);
  }

  /// Writes the next tensor's values.
  /// @throws UsageError if `name`, the type or the count is not that of the next entry; ResourceError if the disk
  /// refuses
  template <class T>
  void write(std::string_view name, std::span<T const> values) {
    FSDP_EXPECTS(next_ < entries_.size(),
                 "'{}': tensor '{}' was written after all {} declared tensors; declare each tensor before you write it",
                 path_.string(), name, entries_.size());
    auto const& entry = entries_[next_];
    FSDP_EXPECTS(entry.name == name, "'{}': expected tensor '{}' next, got '{}'", path_.string(), entry.name, name);
    FSDP_EXPECTS(entry.dtype == dtype_of<T> && entry.numel() == static_cast<std::int64_t>(values.size()),
                 "'{}': tensor '{}': expected {} x {}, got {} x {}", path_.string(), name, entry.numel(),
                 fsdp::name(entry.dtype), values.size(), fsdp::name(dtype_of<T>));
    file_->write(std::as_bytes(values));
    ++next_;
  }

  /// Waits until everything is on the disk, and gives the file its name.
  /// @throws UsageError if tensors are missing; ResourceError if the disk refuses
  void finish() {
    FSDP_EXPECTS(next_ == entries_.size(), "'{}': only {} of {} tensors were written", path_.string(), next_,
                 entries_.size());
    file_->finish();
    rename_durably(temporary_, path_);
    file_.reset();
  }

 private:
  std::filesystem::path path_, temporary_;
  std::vector<TensorEntry> entries_;
  std::size_t next_ = 0;
  std::optional<OutputFile> file_;
};

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE::checkpoint
