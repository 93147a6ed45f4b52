// SPDX-License-Identifier: Apache-2.0
// The safetensors file format (https://github.com/huggingface/safetensors): a reader that maps a file and verifies
// all of its header, and a writer that streams.
#pragma once

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <limits>
#include <map>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

#include "fsdp/error.hpp"
#include "fsdp/files.hpp"
#include "fsdp/json.hpp"
#include "fsdp/tensor.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE::checkpoint {

/// A tensor of a file: name, element type, extents.
struct TensorEntry {
  std::string name;                 ///< name in the file, unique there
  DType dtype = DType::f32;         ///< type of an element
  std::vector<std::int64_t> shape;  ///< row-major extents; none for a scalar

  /// Number of elements: the product of the extents.
  std::int64_t numel() const {
    std::int64_t product = 1;
    for (auto const extent : shape) product *= extent;
    return product;
  }
};

namespace detail {

inline constexpr std::size_t length_bytes = 8;  ///< the header's length, little-endian, comes first
inline constexpr std::uint64_t longest_header = 100'000'000;

std::string_view format_name(DType type);

/// An element type of safetensors that is not in DType.
struct OtherType {
  std::string_view name;
  std::size_t bytes;  ///< bytes of an element
};
inline constexpr OtherType other_types[] = {{"BOOL", 1}, {"U8", 1},  {"I8", 1},  {"F8_E4M3", 1}, {"F8_E5M2", 1},
                                            {"U16", 2},  {"I16", 2}, {"U32", 4}, {"I32", 4},     {"U64", 8}};

}  // namespace detail

/// The beginning of a file: the header's length, and the header. The tensors' bytes follow end to end, from a multiple
/// of 8 bytes on.
/// @param metadata  texts for the header's "__metadata__"    @param file  its name, for messages
/// @throws UsageError if a name occurs twice
std::string safetensors_header(std::vector<TensorEntry> const& entries,
                               std::map<std::string, std::string> const& metadata, std::string_view file);

/// A safetensors file, mapped and checked: header length, JSON, names, types, extents, and that the tensors' bytes
/// cover the data exactly, without gap or overlap.
class SafetensorsFile {
 public:
  /// @throws ConfigError naming the file and what is wrong with it
  explicit SafetensorsFile(std::filesystem::path path);
  SafetensorsFile(SafetensorsFile const&) = delete;
  SafetensorsFile& operator=(SafetensorsFile const&) = delete;
  ~SafetensorsFile() { unmap(); }

  /// In the order of their bytes.
  std::vector<TensorEntry> const& entries() const { return entries_; }
  std::map<std::string, std::string> const& metadata() const { return metadata_; }  ///< the header's "__metadata__"
  /// Names of tensors whose type is none of DType's (masks, quantised weights): they take their place in the file, and
  /// cannot be read.
  /// @return by name, what the file calls their type
  std::map<std::string, std::string_view, std::less<>> const& other_types() const { return other_types_; }
  /// Whether the file has a tensor of this name, of one of DType's types.
  bool contains(std::string_view name) const { return index_.find(name) != index_.end(); }
  /// @throws ConfigError if there is no such tensor
  TensorEntry const& entry(std::string_view name) const { return entries_[find(name)]; }

  /// Reads elements [first, first + out.size()) of an F32, BF16 or F16 tensor, as fp32.
  /// @param shape  the extents that the tensor must have
  /// @throws ConfigError if the tensor is missing or has another shape or type; UsageError if the range lies outside it
  void read(std::string_view name, std::span<std::int64_t const> shape, std::int64_t first, std::span<float> out) const;

 private:
  struct Placed {
    std::uint64_t begin, end;
    TensorEntry entry;
    detail::OtherType const* other;  ///< null where it is of one of DType's
  };

  template <class... Args>
  [[noreturn]] void wrong(fsdp::detail::FormatTextOf<Args...> text, Args const&... args) const {
    fail<ConfigError>("'{}': {}", path_.string(), formatted<Args...>(text, args...));
  }
  template <class T>
  static void widen(std::byte const* from, std::span<float> out) {
    for (std::size_t i = 0; i < out.size(); ++i) {
      T value;
      std::memcpy(&value, from + i * sizeof(T), sizeof(T));
      out[i] = static_cast<float>(value);
    }
  }
  std::size_t find(std::string_view name) const;

  void map();
  void unmap();

  void parse();

  void read_metadata(Json const& value);
  Placed read_entry(std::string const& name, Json const& value) const;

  std::filesystem::path path_;
  std::byte const* base_ = nullptr;
  std::byte const* data_ = nullptr;
  std::size_t bytes_ = 0;
  std::vector<TensorEntry> entries_;
  std::vector<std::size_t> begins_;
  std::map<std::string, std::size_t, std::less<>> index_;
  std::map<std::string, std::string_view, std::less<>> other_types_;
  std::map<std::string, std::string> metadata_;
};

/// Writes a safetensors file tensor by tensor, in the order of `entries`. The file appears under its name only when
/// `finish` has run; until then it is `path` + ".tmp", which the destructor removes.
class SafetensorsWriter {
 public:
  /// @param metadata  texts for the header's "__metadata__"
  /// @throws ResourceError if the file cannot be created; UsageError if a name occurs twice
  SafetensorsWriter(std::filesystem::path path, std::vector<TensorEntry> entries,
                    std::map<std::string, std::string> const& metadata = {});
  SafetensorsWriter(SafetensorsWriter const&) = delete;
  SafetensorsWriter& operator=(SafetensorsWriter const&) = delete;
  ~SafetensorsWriter();

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
  void finish();

 private:
  std::filesystem::path path_, temporary_;
  std::vector<TensorEntry> entries_;
  std::size_t next_ = 0;
  std::optional<OutputFile> file_;
};

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE::checkpoint

#if FSDP_CHECKPOINT_BODIES

namespace fsdp::inline FSDP_VERSION_NAMESPACE::checkpoint {

FSDP_BODY std::string_view detail::format_name(DType type) {
  switch (type) {
    case DType::f32: return "F32";
    case DType::bf16: return "BF16";
    case DType::f16: return "F16";
    case DType::f64: return "F64";
    case DType::i64: return "I64";
  }
  return "?";
}

FSDP_BODY std::string safetensors_header(std::vector<TensorEntry> const& entries,
                                         std::map<std::string, std::string> const& metadata, std::string_view file) {
  std::string text;
  auto const add = [&](std::string const& name, Json const& value) {
    text += (text.empty() ? "{" : ",") + Json(name).dump() + ":" + value.dump();
  };
  if (!metadata.empty()) add("__metadata__", metadata);
  std::set<std::string_view> names;
  std::int64_t offset = 0;
  for (auto const& entry : entries) {
    FSDP_EXPECTS(names.insert(entry.name).second, "'{}': tensor '{}' occurs twice", file, entry.name);
    auto const end = offset + entry.numel() * static_cast<std::int64_t>(size_of(entry.dtype));
    add(entry.name,
        {{"dtype", detail::format_name(entry.dtype)}, {"shape", entry.shape}, {"data_offsets", {offset, end}}});
    offset = end;
  }
  text += text.empty() ? "{}" : "}";
  auto const length = (text.size() + 7) / 8 * 8;
  std::string bytes;
  for (std::size_t i = 0; i < detail::length_bytes; ++i) bytes += static_cast<char>(length >> (8 * i));
  bytes += text;
  bytes.resize(detail::length_bytes + length, ' ');
  return bytes;
}

FSDP_BODY SafetensorsFile::SafetensorsFile(std::filesystem::path path) : path_(std::move(path)) {
  map();
  try {
    parse();
  } catch (...) {
    unmap();
    throw;
  }
}

FSDP_BODY void SafetensorsFile::read(std::string_view name, std::span<std::int64_t const> shape, std::int64_t first,
                                     std::span<float> out) const {
  auto const index = find(name);
  auto const& entry = entries_[index];
  if (!std::equal(shape.begin(), shape.end(), entry.shape.begin(), entry.shape.end()))
    wrong("tensor '{}': expected shape ({}), got ({})", name, listed(shape), listed(entry.shape));
  FSDP_EXPECTS(first >= 0 && first + static_cast<std::int64_t>(out.size()) <= entry.numel(),
               "'{}': tensor '{}': expected a range of its {} elements, got {} to {}", path_.string(), name,
               entry.numel(), first, first + static_cast<std::int64_t>(out.size()));
  if (out.empty()) return;
  auto const* const from = data_ + begins_[index] + static_cast<std::size_t>(first) * size_of(entry.dtype);
  switch (entry.dtype) {
    case DType::f32: std::memcpy(out.data(), from, out.size_bytes()); return;
    case DType::bf16: return widen<bf16>(from, out);
    case DType::f16: return widen<fp16>(from, out);
    case DType::f64:
    case DType::i64: break;
  }
  wrong("tensor '{}': expected dtype F32, BF16 or F16, got {}", name, detail::format_name(entry.dtype));
}

FSDP_BODY std::size_t SafetensorsFile::find(std::string_view name) const {
  auto const found = index_.find(name);
  if (found != index_.end()) return found->second;
  if (auto const other = other_types_.find(name); other != other_types_.end())
    wrong("tensor '{}': expected dtype F32, BF16 or F16, got {}", name, other->second);
  wrong("there is no tensor '{}'", name);
}

FSDP_BODY void SafetensorsFile::map() {
  int const descriptor = ::open(path_.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (descriptor < 0) wrong("cannot be opened: {}", detail::system_text(errno));
  struct stat status {};
  int error = ::fstat(descriptor, &status) == 0 ? 0 : errno;
  if (error == 0 && !S_ISREG(status.st_mode)) error = S_ISDIR(status.st_mode) ? EISDIR : EINVAL;
  if (error == 0) {
    bytes_ = static_cast<std::size_t>(status.st_size);
    if (bytes_ > 0) {
      void* const address = ::mmap(nullptr, bytes_, PROT_READ, MAP_SHARED, descriptor, 0);
      if (address == MAP_FAILED) error = errno;
      if (address != MAP_FAILED) base_ = static_cast<std::byte const*>(address);
    }
  }
  ::close(descriptor);
  if (error != 0) wrong("cannot be read: {}", detail::system_text(error));
}

FSDP_BODY void SafetensorsFile::unmap() {
  if (base_ != nullptr) ::munmap(const_cast<std::byte*>(std::exchange(base_, nullptr)), bytes_);
}

FSDP_BODY void SafetensorsFile::parse() {
  if (bytes_ < detail::length_bytes) wrong("{} bytes are too few for a safetensors file: it is truncated", bytes_);
  std::uint64_t length = 0;
  for (std::size_t i = 0; i < detail::length_bytes; ++i) length |= static_cast<std::uint64_t>(base_[i]) << (8 * i);
  if (length > detail::longest_header || length > bytes_ - detail::length_bytes)
    wrong(
        "a header of {} bytes, which its first 8 bytes announce, does not fit into the file of {} bytes: it is "
        "truncated, or no safetensors file",
        length, bytes_);
  auto const data_bytes = bytes_ - detail::length_bytes - length;
  data_ = base_ + detail::length_bytes + length;

  std::string_view const text(reinterpret_cast<char const*>(base_) + detail::length_bytes, length);
  auto const header = parse_object(text, formatted("the header of '{}'", path_.string()));
  std::vector<Placed> placed;
  for (auto const& item : header.items()) {
    if (item.key() == "__metadata__") {
      read_metadata(item.value());
      continue;
    }
    placed.push_back(read_entry(item.key(), item.value()));
    auto& [begin, end, entry, other] = placed.back();
    auto const& offsets = item.value()["data_offsets"];
    if (!offsets.is_array() || offsets.size() != 2 || !offsets[0].is_number_unsigned() ||
        !offsets[1].is_number_unsigned())
      wrong("tensor '{}': expected two 'data_offsets'", item.key());
    begin = offsets[0].get<std::uint64_t>(), end = offsets[1].get<std::uint64_t>();
    if (begin > end || end > data_bytes)
      wrong("tensor '{}': bytes {} to {} lie outside the {} bytes of data: the file is truncated or damaged",
            item.key(), begin, end, data_bytes);
    auto const element = other ? other->bytes : size_of(entry.dtype);
    if (end - begin != static_cast<std::uint64_t>(entry.numel()) * element)
      wrong("tensor '{}': shape ({}) and dtype {} do not match its {} bytes of data", item.key(), listed(entry.shape),
            other ? other->name : detail::format_name(entry.dtype), end - begin);
  }
  std::sort(placed.begin(), placed.end(),
            [](Placed const& a, Placed const& b) { return a.begin != b.begin ? a.begin < b.begin : a.end < b.end; });
  std::uint64_t covered = 0;
  for (auto& tensor : placed) {
    if (tensor.begin != covered)
      wrong("tensor '{}' begins at byte {} of the data, {} was expected ({})", tensor.entry.name, tensor.begin, covered,
            tensor.begin < covered ? "an overlap" : "a gap");
    covered = tensor.end;
    if (tensor.other) {
      other_types_.emplace(std::move(tensor.entry.name), tensor.other->name);
      continue;
    }
    begins_.push_back(static_cast<std::size_t>(tensor.begin));
    index_.emplace(tensor.entry.name, entries_.size());
    entries_.push_back(std::move(tensor.entry));
  }
  if (covered != data_bytes) wrong("its tensors take {} bytes, but its data have {} bytes", covered, data_bytes);
}

FSDP_BODY void SafetensorsFile::read_metadata(Json const& value) {
  if (!value.is_object()) wrong("expected an object '__metadata__'");
  for (auto const& item : value.items()) {
    if (!item.value().is_string()) wrong("expected a text for '{}' in '__metadata__'", item.key());
    metadata_.emplace(item.key(), item.value().get<std::string>());
  }
}

FSDP_BODY SafetensorsFile::Placed SafetensorsFile::read_entry(std::string const& name, Json const& value) const {
  if (!value.is_object() || !value.contains("dtype") || !value.contains("shape") || !value.contains("data_offsets"))
    wrong("tensor '{}': expected 'dtype', 'shape' and 'data_offsets'", name);
  Placed placed{0, 0, {name, DType::f32, {}}, nullptr};
  auto& entry = placed.entry;
  auto const type = value["dtype"].is_string() ? value["dtype"].get<std::string>() : value["dtype"].dump();
  bool known = false;
  for (auto const candidate : {DType::f32, DType::bf16, DType::f16, DType::f64, DType::i64})
    if (type == detail::format_name(candidate)) entry.dtype = candidate, known = true;
  for (auto const& candidate : detail::other_types)
    if (type == candidate.name) placed.other = &candidate, known = true;
  if (!known) wrong("tensor '{}': expected a dtype such as F32, BF16 or F16, got {}", name, type);
  if (!value["shape"].is_array()) wrong("tensor '{}': expected an array 'shape'", name);
  std::uint64_t product = 1;
  for (auto const& extent : value["shape"]) {
    constexpr std::uint64_t most = std::numeric_limits<std::int64_t>::max() / 8;
    if (!extent.is_number_unsigned()) wrong("tensor '{}': extent {} is not a whole number", name, extent.dump());
    auto const count = extent.get<std::uint64_t>();
    if (count > most || (count != 0 && product > most / count)) wrong("tensor '{}': its shape is too large", name);
    product *= count;
    entry.shape.push_back(static_cast<std::int64_t>(count));
  }
  return placed;
}

FSDP_BODY SafetensorsWriter::SafetensorsWriter(std::filesystem::path path, std::vector<TensorEntry> entries,
                                               std::map<std::string, std::string> const& metadata)
    : path_(std::move(path)), temporary_(path_.string() + ".tmp"), entries_(std::move(entries)) {
  auto const header = safetensors_header(entries_, metadata, path_.string());
  file_.emplace(temporary_);
  file_->write(header);
}

FSDP_BODY SafetensorsWriter::~SafetensorsWriter() {
  if (!file_) return;
  file_.reset();
  std::error_code ignored;
  std::filesystem::remove(temporary_, ignored);
}

FSDP_BODY void SafetensorsWriter::finish() {
  FSDP_EXPECTS(next_ == entries_.size(), "'{}': only {} of {} tensors were written", path_.string(), next_,
               entries_.size());
  file_->finish();
  rename_durably(temporary_, path_);
  file_.reset();
}

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE::checkpoint

#endif
