// SPDX-License-Identifier: Apache-2.0
// Where tensors lie inside a flat parameter, and which part of it is whose; tables of names. Pure arithmetic.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "fsdp/error.hpp"
#include "fsdp/strategy.hpp"
#include "fsdp/tensor.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE {

namespace detail {

/// Finds entries of a list by their names in constant time. The list keeps the names; the table has a hash for each
/// entry. Entries are added and removed at the list's end. Several entries may have one name.
class NameTable {
 public:
  static constexpr std::size_t none = ~std::size_t{0};

  std::size_t size() const { return entries_.size(); }
  /// Takes memory for one more entry. @throws std::bad_alloc; nothing has changed then
  [[gnu::cold]] void reserve() {
    if (entries_.size() == entries_.capacity()) entries_.reserve(entries_.size() < 8 ? 16 : 2 * entries_.size());
    if (entries_.size() < heads_.size()) return;
    std::vector<std::size_t> heads(heads_.empty() ? 16 : 2 * heads_.size(), none);
    heads_.swap(heads);
    for (std::size_t i = 0; i < entries_.size(); ++i) link(i);
  }
  /// Adds the entry of position size(). @pre reserve() was called for it
  [[gnu::cold]] void add(std::string_view name) noexcept {
    entries_.push_back({hash_name(name), none});
    link(entries_.size() - 1);
  }
  /// Removes all but the first `count` entries.
  [[gnu::cold]] void truncate(std::size_t count) noexcept {
    for (; entries_.size() > count; entries_.pop_back()) head(entries_.back().hash) = entries_.back().next;
  }
  /// @param is_it  called with positions of entries that may have the name, the last one first; says whether one is
  /// the entry that is looked for
  /// @return its position; none: there is no such entry
  template <class IsIt>
  std::size_t find(std::string_view name, IsIt const& is_it) const {
    if (entries_.empty()) return none;
    auto const wanted = hash_name(name);
    for (auto i = heads_[wanted & (heads_.size() - 1)]; i != none; i = entries_[i].next)
      if (entries_[i].hash == wanted && is_it(i)) return i;
    return none;
  }

 private:
  struct Entry {
    std::uint64_t hash;
    std::size_t next;  ///< an earlier entry with the same head; none: there is none
  };

  std::size_t& head(std::uint64_t of) noexcept { return heads_[of & (heads_.size() - 1)]; }
  void link(std::size_t entry) noexcept {
    auto& first = head(entries_[entry].hash);
    entries_[entry].next = first;
    first = entry;
  }

  std::vector<Entry> entries_;
  std::vector<std::size_t> heads_;  ///< a power of two of them: the last entry of each chain
};

}  // namespace detail

/// Every tensor starts on a multiple of this many elements, and so does every shard: 256 bytes in fp32, 128 in bf16.
inline constexpr std::int64_t layout_alignment = 64;
/// More elements than any tensor has; bytes and padding of so many still fit 64 bits.
inline constexpr std::int64_t largest_numel = std::int64_t{1} << 56;

/// Options of a tensor that `describe` names.
struct TensorOptions {
  bool decay = true;                ///< weight decay applies
  Init init = init::normal(0.02f);  ///< how its elements start
  std::int64_t tag = 0;             ///< the caller's: TensorInfo has it, and the library does not read it
  bool frozen = false;              ///< it does not train: see UnitOptions::frozen, which says it of a whole unit
  std::optional<ShardingStrategy> strategy{};  ///< not set: that of the module's unit
};
/// No weight decay, starts at zero: biases.
inline constexpr TensorOptions no_decay{.decay = false, .init = init::zeros};
/// Does not train.
inline constexpr TensorOptions frozen{.frozen = true};

/// A half-open range of elements.
struct Range {
  std::int64_t begin = 0;                                                  ///< first element
  std::int64_t end = 0;                                                    ///< one past the last element
  constexpr std::int64_t size() const { return end - begin; }              ///< number of elements
  constexpr bool empty() const { return begin >= end; }                    ///< whether the range has no element
  friend constexpr bool operator==(Range const&, Range const&) = default;  ///< equal begin and equal end
};

/// The smallest multiple of `alignment` that is at least `value`. @pre value >= 0, alignment > 0
constexpr std::int64_t align_up(std::int64_t value, std::int64_t alignment) {
  return (value + alignment - 1) / alignment * alignment;
}

/// The common part of two ranges; empty (begin == end) where there is none.
constexpr Range intersect(Range a, Range b) {
  auto const begin = std::max(a.begin, b.begin);
  return {begin, std::max(begin, std::min(a.end, b.end))};
}

/// The equal slice `rank` of `total` elements. @pre total is a multiple of ranks.
constexpr Range shard_range(std::int64_t total, int ranks, int rank) {
  auto const each = total / ranks;
  return {each * rank, each * (rank + 1)};
}

/// One tensor of a flat parameter.
struct TensorInfo {
  std::string name;                 ///< full name: the module's prefix, a dot, the name in `describe`
  std::vector<std::int64_t> shape;  ///< row-major extents
  std::int64_t numel = 0;           ///< product of the extents
  std::int64_t offset = 0;          ///< first element inside the flat parameter
  bool decay = true;                ///< weight decay applies
  Init init{};                      ///< how its elements start
  std::int64_t tag = 0;             ///< of TensorOptions

  Range range() const { return {offset, offset + numel}; }  ///< its elements inside the flat parameter
};

/// How a unit of so many elements, without padding at its end, is divided among ranks.
///
/// [Note: Padding] Shards must be equally long, for collectives; and a norm must be the sum of the same shares under
/// every strategy. So a unit is cut into slices whose length depends on the unit and the world alone, at most `world`
/// of them, and a shard is a whole number of slices. Padding is less than a slice and 64 elements a shard: where
/// all ranks shard, a slice is a shard.
struct Division {
  std::int64_t slice = 0;   ///< elements, a multiple of layout_alignment
  std::int64_t shard = 0;   ///< elements
  std::int64_t padded = 0;  ///< elements of the unit: `shards` times `shard`

  constexpr Division() = default;
  /// Divides a unit of `elements` elements into `shards` equal shards, in a run of `world` ranks.
  constexpr Division(std::int64_t elements, int world, int shards)
      : slice(align_up(align_up(elements, world) / world, layout_alignment)),
        shard(elements == 0 ? 0 : align_up(elements, slice * shards) / shards),
        padded(shard * shards) {}
};

/// A tensor's part inside a range of the flat parameter.
struct Segment {
  std::size_t tensor = 0;   ///< index into FlatLayout::tensors()
  std::int64_t first = 0;   ///< first element, counted inside the tensor
  std::int64_t offset = 0;  ///< first element, counted from the range's begin
  std::int64_t count = 0;   ///< number of elements
};

/// The tensors of one unit laid end to end. Built by add(), closed by seal().
class FlatLayout {
 public:
  /// Adds a tensor; a name that is there already means the same storage (a tied parameter). An extent may be 0: a
  /// tensor without elements.
  /// @return its index in tensors()
  /// @throws UsageError if the name is there with another shape, weight decay, init or tag, or an extent is negative
  [[gnu::cold]] std::size_t add(TensorInfo tensor) {
    tensor.numel = 1;
    for (auto const extent : tensor.shape) {
      FSDP_EXPECTS(extent >= 0, "tensor '{}': extents must not be negative, got ({})", tensor.name,
                   listed(tensor.shape));
      FSDP_EXPECTS(!__builtin_mul_overflow(tensor.numel, extent, &tensor.numel) && tensor.numel <= largest_numel,
                   "tensor '{}': shape ({}) has too many elements", tensor.name, listed(tensor.shape));
    }
    auto const known = names_.find(tensor.name, [&](std::size_t i) { return tensors_[i].name == tensor.name; });
    if (known != detail::NameTable::none) {
      expect_same(tensors_[known], tensor);
      return known;
    }
    tensor.offset = tensors_.empty() ? 0 : align_up(tensors_.back().range().end, layout_alignment);
    names_.reserve();
    tensors_.push_back(std::move(tensor));
    names_.add(tensors_.back().name);
    numel_ += tensors_.back().numel;
    return tensors_.size() - 1;
  }

  /// Forgets all but the first `count` tensors.
  [[gnu::cold]] void truncate(std::size_t count) noexcept {
    names_.truncate(count);
    for (; tensors_.size() > count; tensors_.pop_back()) numel_ -= tensors_.back().numel;
  }

  /// Pads the whole, so that it divides among `shards` of `world` ranks. See Division.
  Division seal(int world, int shards) {
    auto const division = divided(world, shards);
    padded_ = division.padded;
    return division;
  }
  /// The division that seal(world, shards) would return; the layout stays as it is.
  Division divided(int world, int shards) const {
    return {tensors_.empty() ? 0 : tensors_.back().range().end, world, shards};
  }

  std::vector<TensorInfo> const& tensors() const { return tensors_; }  ///< in the order of add()
  std::int64_t numel() const { return numel_; }                        ///< elements of the tensors alone
  std::int64_t padded() const { return padded_; }                      ///< elements with all padding; 0 before seal()

  /// The ranges that no tensor covers, in order. @pre seal() was called
  [[gnu::cold]] std::vector<Range> padding() const {
    std::vector<Range> gaps;
    std::int64_t end = 0;
    for (auto const& tensor : tensors_) {
      if (tensor.offset > end) gaps.push_back({end, tensor.offset});
      end = tensor.range().end;
    }
    if (padded_ > end) gaps.push_back({end, padded_});
    return gaps;
  }

  /// The parts of tensors inside `range`, in order.
  [[gnu::cold]] std::vector<Segment> segments(Range range) const {
    std::vector<Segment> parts;
    for (std::size_t i = 0; i < tensors_.size(); ++i) {
      auto const part = intersect(tensors_[i].range(), range);
      if (!part.empty()) parts.push_back({i, part.begin - tensors_[i].offset, part.begin - range.begin, part.size()});
    }
    return parts;
  }

 private:
  /// @throws UsageError if two declarations of a tensor differ
  [[gnu::cold]] static void expect_same(TensorInfo const& first, TensorInfo const& again) {
    FSDP_EXPECTS(again.shape == first.shape,
                 "modules that share tensor '{}' declare it with shape ({}) and with shape ({})", first.name,
                 listed(first.shape), listed(again.shape));
    FSDP_EXPECTS(again.decay == first.decay,
                 "modules that share tensor '{}' declare it both with and without weight decay", first.name);
    FSDP_EXPECTS(again.init == first.init, "modules that share tensor '{}' declare it with init {} and with init {}",
                 first.name, to_text(first.init), to_text(again.init));
    FSDP_EXPECTS(again.tag == first.tag, "modules that share tensor '{}' declare it with tag {} and with tag {}",
                 first.name, first.tag, again.tag);
  }

  std::vector<TensorInfo> tensors_;
  detail::NameTable names_;  ///< of tensors_
  std::int64_t numel_ = 0;
  std::int64_t padded_ = 0;
};

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE
