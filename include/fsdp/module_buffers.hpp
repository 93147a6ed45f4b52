// SPDX-License-Identifier: Apache-2.0
// Buffers of modules, such as running means: values that are not parameters, and that each rank has whole.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "fsdp/concepts.hpp"
#include "fsdp/detail/engine/agreement.hpp"
#include "fsdp/error.hpp"
#include "fsdp/layout.hpp"
#include "fsdp/memory.hpp"
#include "fsdp/tensor.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE {

/// A buffer of a module: a name, and where its values are.
struct ModuleBuffer {
  std::string name;                   ///< full, unique in a list
  std::string type{};                 ///< of an element, compared over ranks: "fp32", "int64"
  std::vector<std::int64_t> shape{};  ///< row-major extents
  void* data = nullptr;               ///< row-major, in memory of the host or of the engine's device
  std::size_t bytes = 0;              ///< size of all elements together
  std::optional<DType> floating{};    ///< fp32, fp64, bf16 or fp16, of which means are taken; not set: another type

  ModuleBuffer() = default;
  /// @param values  as many elements as `extents` say, of an arithmetic type, bf16 or fp16
  /// @throws UsageError if an extent is negative, or there are more than largest_numel elements
  template <class T>
  ModuleBuffer(std::string full_name, T* values, std::vector<std::int64_t> extents)
      : name(std::move(full_name)), shape(std::move(extents)), data(values), bytes(sizeof(T)) {
    constexpr bool narrow = std::is_same_v<T, bf16> || std::is_same_v<T, fp16>;
    constexpr bool wide = std::is_same_v<T, float> || std::is_same_v<T, double>;
    static_assert(narrow || wide || std::is_integral_v<T>,
                  "fsdp: a buffer's elements are float, double, bf16, fp16 or integers");
    if constexpr (narrow || wide)
      floating = dtype_of<T>, type = fsdp::name(*floating);
    else
      type = formatted("{}int{}", std::is_signed_v<T> ? "" : "u", 8 * sizeof(T));
    std::int64_t count = 1;
    for (auto const extent : shape) {
      FSDP_EXPECTS(extent >= 0, "buffer '{}': extents must not be negative, got ({})", name, listed(shape));
      FSDP_EXPECTS(!__builtin_mul_overflow(count, extent, &count) && count <= largest_numel,
                   "buffer '{}': shape ({}) has too many elements", name, listed(shape));
    }
    bytes *= static_cast<std::size_t>(count);
  }
};

/// The values that all ranks get of a buffer.
enum class BufferSync : unsigned char {
  average,    ///< the mean over ranks of fp32, fp64, bf16 and fp16; rank 0's values of other types
  broadcast,  ///< rank 0's values
};

namespace detail {

/// @return the fault of a list in which two buffers have one name, or one has no memory; empty: there is none
[[gnu::cold]] inline std::string fault_of(std::vector<ModuleBuffer> const& buffers) {
  NameTable names;
  for (auto const& buffer : buffers) {
    if (buffer.data == nullptr && buffer.bytes > 0) return formatted("buffer '{}' is nullptr", buffer.name);
    auto const same = [&](std::size_t earlier) { return buffers[earlier].name == buffer.name; };
    if (names.find(buffer.name, same) != NameTable::none)
      return formatted("two buffers have the name '{}'; give each buffer its own name", buffer.name);
    names.reserve();
    names.add(buffer.name);
  }
  return {};
}
/// @param what  the call, for the message
/// @throws UsageError if the list has a fault
[[gnu::cold]] inline void expect_buffers(int rank, std::string_view what, std::vector<ModuleBuffer> const& buffers) {
  if (auto const fault = fault_of(buffers); !fault.empty()) fail<UsageError>("rank {}: {}: {}", rank, what, fault);
}

/// The mean over ranks of `count` elements, in the place of the first rank's. Added as doubles in the order of ranks;
/// fp32 and fp64 are rounded once, bf16 and fp16 through fp32. A mean of equal fp32, bf16 or fp16 values is this value.
/// @param values  of the first rank; those of the next one are `stride` bytes further on
template <class T>
[[gnu::cold]] void mean_in_order(std::byte* values, std::size_t stride, int ranks, std::size_t count) {
  using Wide = std::conditional_t<std::is_same_v<T, double>, double, float>;
  auto const at = [&](std::size_t i, int rank) {
    T value;
    std::memcpy(&value, values + static_cast<std::size_t>(rank) * stride + i * sizeof(T), sizeof(T));
    return static_cast<double>(static_cast<Wide>(value));
  };
  for (std::size_t i = 0; i < count; ++i) {
    auto sum = at(i, 0);
    for (int rank = 1; rank < ranks; ++rank) sum += at(i, rank);
    T const mean(static_cast<Wide>(sum / static_cast<double>(ranks)));
    std::memcpy(values + i * sizeof(T), &mean, sizeof(T));
  }
}

/// Moves buffers over the ranks of an engine, packed into few collectives.
///
/// [Note: Buffers by their bytes] Collectives move bytes: an all-gather gives each rank the values of all, and each
/// adds them in the order of ranks. So every rank has the same bits, over each communicator, whoever comes late.
/// Buffers are small beside parameters; an all-reduce would move less, and NCCL's has no fixed order.
template <class E>
class BufferMover {
 public:
  /// @note Collective: yes.
  BufferMover(E& engine, std::vector<ModuleBuffer> const& buffers, BufferSync how)
      : engine_(&engine),
        buffers_(&buffers),
        ranks_(how == BufferSync::average ? engine.world_size() : 1),
        chunk_(chunk_of(buffers, static_cast<std::size_t>(ranks_))),
        staging_(engine.world(), engine.account(), MemoryTag::workspace, chunk_ * static_cast<std::size_t>(ranks_)) {}

  /// @note Collective: yes.
  void run() {
    for (auto const& buffer : *buffers_)
      for (std::size_t begin = 0; begin < buffer.bytes;) {
        auto const take = std::min(buffer.bytes - begin, chunk_ - used_);
        pieces_.push_back({&buffer, begin, take, used_});
        begin += take;
        used_ += padded(take);
        if (used_ == chunk_) move();
      }
    if (used_ > 0) move();
    wait_for_peers();
    engine_->device().synchronize(engine_->compute());
  }

 private:
  static constexpr std::size_t staged_bytes = std::size_t{4} << 20, line = 64;

  struct Piece {
    ModuleBuffer const* buffer;
    std::size_t begin, bytes;  ///< of it
    std::size_t at;            ///< in the chunk

    std::byte* data() const { return static_cast<std::byte*>(buffer->data) + begin; }
  };

  static std::size_t padded(std::size_t bytes) { return (bytes + line - 1) / line * line; }
  /// Bytes of a rank that one collective moves: all, or what fits.
  static std::size_t chunk_of(std::vector<ModuleBuffer> const& buffers, std::size_t ranks) {
    std::size_t all = 0;
    for (auto const& buffer : buffers) all += padded(buffer.bytes);
    return std::min(all, std::max(line, staged_bytes / ranks / line * line));
  }

  /// Moves the chunk that is full, or the last one.
  void move() {
    auto& stream = engine_->compute();
    auto const& device = engine_->device();
    auto const rank = engine_->rank();
    bool const averages = ranks_ > 1;
    auto* const own = staging_.data() + (averages ? static_cast<std::size_t>(rank) * used_ : 0);
    wait_for_peers();
    for (auto const& piece : pieces_)
      if (averages || rank == 0) device.copy_async(stream, own + piece.at, piece.data(), piece.bytes);
    auto& comm = engine_->shards().scalar_communicator();
    auto const count = used_ / sizeof(float);
    auto* const all = staging_.template as<float>();
    auto const label = engine_->shards().history().label("buffers", averages ? "average" : "broadcast");
    last_ = averages ? comm.all_gather(stream, reinterpret_cast<float const*>(own), all, count, label)
                     : comm.broadcast(stream, all, count, 0, label);
    if (averages)
      take_means();
    else if (rank != 0)
      for (auto const& piece : pieces_) device.copy_async(stream, piece.data(), own + piece.at, piece.bytes);
    pieces_.clear();
    used_ = 0;
  }
  void take_means() {
    auto& stream = engine_->compute();
    auto const& device = engine_->device();
    values_.resize(used_ * static_cast<std::size_t>(ranks_));
    device.copy_async(stream, values_.data(), staging_.data(), values_.size());
    device.synchronize(stream);
    for (auto const& piece : pieces_) {
      auto* const first = values_.data() + piece.at;
      auto const type = piece.buffer->floating;
      auto const mean = [&]<class T>(T) { mean_in_order<T>(first, used_, ranks_, piece.bytes / sizeof(T)); };
      if (type == DType::f32) mean(float{});
      if (type == DType::f64) mean(double{});
      if (type == DType::bf16) mean(bf16{});
      if (type == DType::f16) mean(fp16{});
      device.copy_async(stream, piece.data(), first, piece.bytes);
    }
    device.synchronize(stream);
  }
  void wait_for_peers() {
    if (last_.sequence != 0)
      engine_->shards().scalar_communicator().wait_for_peers(engine_->compute(), last_, WaitSite::gather_peers_read);
  }

  E* engine_;
  std::vector<ModuleBuffer> const* buffers_;
  int ranks_;          ///< whose values are staged
  std::size_t chunk_;  ///< bytes of a rank
  AccountedMemory<typename E::Comm> staging_;
  std::vector<std::byte> values_;  ///< of all ranks, in host memory
  std::vector<Piece> pieces_;      ///< of the chunk that is filled
  std::size_t used_ = 0;           ///< of it
  Ticket last_{};
};

template <class E>
[[gnu::cold]] void sync_buffers(E& engine, std::vector<ModuleBuffer> const& buffers, BufferSync how) {
  auto const shards = engine.shards();
  bool const averages = how == BufferSync::average;
  char const* const call = averages ? "average_buffers" : "broadcast_buffers";
  auto const entry = shards.enter(call);
  engine.seal();
  engine.synchronize();  // what wrote them is complete; no rank goes on if a stream of one has failed
  std::string text;
  std::size_t bytes = 0;
  for (auto const& buffer : buffers) {
    bytes += buffer.bytes;
    text += formatted("buffer '{}' ({}), {}\n", buffer.name, listed(buffer.shape), buffer.type);
  }
  auto const history = shards.history().text();
  text += formatted("{} buffers in all{}{}", buffers.size(), history.empty() ? "" : ", after ", history);
  if (auto const fault = fault_of(buffers); !fault.empty()) text = fault;  // told to ranks whose lists have none
  shards.with_cause([&] {
    expect_equal_texts<OrderError>(engine.world(), text, averages ? "buffers to average" : "buffers to broadcast");
    expect_buffers(engine.rank(), call, buffers);
    if (engine.world_size() > 1 && bytes > 0) BufferMover<E>(engine, buffers, how).run();
  });
}

}  // namespace detail

/// Gives all ranks rank 0's values of the buffers, bit by bit: `broadcast_buffers(engine, {{"norm.mean", mean, {C}}})`.
/// @param buffers  the same names, types and shapes in the same order on all ranks
/// @throws OrderError on every rank if they differ, or ranks have stepped or discarded otherwise; UsageError if two
/// have one name, or one has no memory, on all ranks: no buffer has changed then
/// @note Stream: behind the work of all streams of the engine, for which the calling thread waits, and for the values.
/// @note Collective: yes; seals the engine. A broadcast for each 4 MiB, which are its workspace at most.
template <class E>
void broadcast_buffers(E& engine, std::vector<ModuleBuffer> const& buffers) {
  detail::sync_buffers(engine, buffers, BufferSync::broadcast);
}
/// Gives all ranks the mean over ranks of fp32, fp64, bf16 and fp16 buffers, with the same bits on every rank and in
/// every run, and rank 0's values of the others. Means are added as doubles in the order of ranks.
/// @param buffers  as in broadcast_buffers
/// @throws as broadcast_buffers
/// @note Stream: as broadcast_buffers.
/// @note Collective: yes; seals the engine. Each rank receives the buffers of all others, in all-gathers of up to 4 MiB
/// over all ranks. Workspace, and as much host memory: at most these 4 MiB.
template <class E>
void average_buffers(E& engine, std::vector<ModuleBuffer> const& buffers) {
  detail::sync_buffers(engine, buffers, BufferSync::average);
}

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE
