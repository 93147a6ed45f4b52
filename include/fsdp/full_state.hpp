// SPDX-License-Identifier: Apache-2.0
// Exports full parameters and gradients of an engine as fp32, unit by unit, and imports parameters into its shards.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "fsdp/communicator.hpp"
#include "fsdp/concepts.hpp"
#include "fsdp/detail/engine/agreement.hpp"
#include "fsdp/detail/kernels/block.hpp"
#include "fsdp/error.hpp"
#include "fsdp/layout.hpp"
#include "fsdp/memory.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE::checkpoint {

/// Records for each tensor whether this rank was given all its parts.
class ReadParts {
 public:
  /// @param tensor   counted over all units
  /// @param is_read  false: this rank's part stays as it is
  void add(std::size_t tensor, bool is_read) {
    if (signs_.size() <= tensor) signs_.resize(tensor + 1, ' ');
    signs_[tensor] = is_read ? '+' : '-';
  }

  /// All ranks that keep parts of a tensor were given them, or none.
  /// @throws ConfigError on every rank if they differ, naming the first tensor and two ranks
  /// @note Collective: yes; rank 0 receives a character a tensor of every rank.
  template <class E>
  [[gnu::cold]] void expect_whole_tensors(E& engine) const {
    auto const problem = comm::ask_first_rank(engine.world(), signs_, "imported tensors", [&](auto const& texts) {
      std::size_t tensor = 0;
      auto const shards = engine.shards();
      for (std::size_t u = 0; u < shards.size(); ++u) {
        for (auto const& info : shards[u].layout().tensors()) {
          auto const given = first_with('+', tensor, texts), left = first_with('-', tensor, texts);
          ++tensor;
          if (given < texts.size() && left < texts.size())
            return formatted("tensor '{}' was given on rank {} and left as it is on rank {}", info.name, given, left);
        }
      }
      return std::string();
    });
    if (!problem.empty())
      fail<ConfigError>("rank {}: ranks differ in what they import: {}. Give it on all ranks or on none", engine.rank(),
                        problem);
  }

 private:
  static std::size_t first_with(char sign, std::size_t tensor, std::vector<std::string> const& texts) {
    std::size_t rank = 0;
    while (rank < texts.size() && (texts[rank].size() <= tensor || texts[rank][tensor] != sign)) ++rank;
    return rank;
  }

  std::string signs_;  ///< one for each tensor: '+' given, '-' left, ' ' not here
};

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE::checkpoint

namespace fsdp::inline FSDP_VERSION_NAMESPACE {

/// All tensors of the engine in declared order, sealing it if need be. @note Collective: the first time.
template <class E>
std::vector<TensorInfo> tensor_list(E& engine) {
  engine.seal();
  auto const shards = engine.shards();
  std::vector<TensorInfo> list;
  for (std::size_t u = 0; u < shards.size(); ++u)
    for (auto const& tensor : shards[u].layout().tensors()) list.push_back(tensor);
  return list;
}

namespace detail {

/// Gathers shards of units in host memory of rank 0, as fp32. At most one unit is there at a time.
///
/// [Note: Memory of an export] Every rank receives the chunks of all ranks, because an all-gather gives all to all. The
/// chunks are shorter the more ranks there are: each rank stages 2^20 elements (4 MiB of fp32), however many ranks
/// share a machine's memory. The number of all-gathers is that of the model's elements divided by 2^20.
template <class E>
class ShardExporter {
 public:
  /// @param element_bytes  the largest size of an element
  /// @throws as export_shards
  /// @note Collective: yes.
  ShardExporter(E& engine, std::size_t element_bytes)
      : engine_(&engine),
        chunk_(std::max<std::int64_t>(least_chunk,
                                      staged_elements / engine.placement().shards / least_chunk * least_chunk)),
        staging_(engine.world(), engine.account(), MemoryTag::workspace,
                 static_cast<std::size_t>(chunk_ * engine.placement().shards) * element_bytes) {}

  /// @throws as export_shards
  /// @note Collective: yes.
  static void begin(E& engine) {
    auto const shards = engine.shards();
    shards.passes().expect_at_rest("parameters are to be exported");
    engine.seal();
    engine.synchronize();  // the last update is complete; no rank exports if a stream of one has failed
    expect_equal_texts<OrderError>(engine.world(), formatted("exports after {}", shards.history().text()),
                                   "what is exported");
  }
  /// @note Collective: yes.
  template <class T, class Visit>
  void add(typename E::Unit& unit, T const* shard, Visit&& visit) {
    auto& stream = engine_->shards().gather_stream();
    auto const& device = engine_->device();
    auto const& where = unit.placement();
    bool const is_first = engine_->rank() == 0;
    auto* const all = staging_.template as<T>();
    std::vector<T> values;
    if (is_first) values.resize(static_cast<std::size_t>(unit.full_numel()));
    for (std::int64_t begin = 0; begin < unit.shard_numel(); begin += chunk_) {
      auto const count = std::min(chunk_, unit.shard_numel() - begin);
      wait_for_peers();
      auto* const own = all + where.shard * count;
      device.copy_async(stream, own, shard + begin, static_cast<std::size_t>(count) * sizeof(T));
      if (where.shards > 1)
        last_ = engine_->shards().gather_communicator().all_gather(
            stream, static_cast<T const*>(own), all, static_cast<std::size_t>(count), Label{unit.name(), "export"});
      for (int rank = 0; is_first && rank < where.shards; ++rank)
        device.copy_async(stream, values.data() + rank * unit.shard_numel() + begin, all + rank * count,
                          static_cast<std::size_t>(count) * sizeof(T));
    }
    device.synchronize(stream);
    if (!is_first) return;
    for (auto const& tensor : unit.layout().tensors()) {
      auto const part = std::span<T const>(values).subspan(static_cast<std::size_t>(tensor.offset),
                                                           static_cast<std::size_t>(tensor.numel));
      if constexpr (std::is_same_v<T, float>) {
        visit(tensor, part);
      } else {
        wide_.resize(part.size());
        for (std::size_t i = 0; i < part.size(); ++i) wide_[i] = widen(part[i]);
        visit(tensor, std::span<float const>(wide_));
      }
    }
  }
  /// @note Collective: yes.
  void end() {
    wait_for_peers();
    engine_->device().synchronize(engine_->shards().gather_stream());
  }

 private:
  static constexpr std::int64_t staged_elements = 1 << 20, least_chunk = 64;

  void wait_for_peers() {
    auto const shards = engine_->shards();
    if (last_.sequence != 0)
      shards.gather_communicator().wait_for_peers(shards.gather_stream(), last_, WaitSite::gather_peers_read);
  }

  E* engine_;
  std::int64_t chunk_;  ///< elements of a rank that one all-gather moves
  AccountedMemory<typename E::Comm> staging_;
  std::vector<float> wide_;
  Ticket last_{};
};

}  // namespace detail

/// Calls `visit(TensorInfo const&, std::span<float const> values)` on rank 0 for every tensor in declared order.
/// At most one unit is in host memory at a time, on rank 0 alone.
/// @param shard_of  the array to export, given a unit: any of shard_numel elements, float, bf16 or fp16; nullptr: none
/// @throws OrderError on every rank if ranks have stepped or discarded otherwise; UsageError inside a use, an
/// evaluation, or an optimizer step that has ended half-way
/// @note Collective: yes; all-gathers the shards in chunks, which take 2^20 elements of workspace on every rank; blocks
/// the calling thread.
template <class E, class ShardOf, class Visit>
void export_shards(E& engine, ShardOf&& shard_of, Visit&& visit) {
  using T = std::remove_cv_t<std::remove_pointer_t<decltype(shard_of(engine.shards()[std::size_t{}]))>>;
  auto const shards = engine.shards();
  auto const entry = shards.enter("an export");
  using Exporter = detail::ShardExporter<E>;
  Exporter::begin(engine);
  Exporter exporter(engine, sizeof(T));
  for (std::size_t u = 0; u < shards.size(); ++u) {
    T const* const shard = shard_of(shards[u]);
    bool const has_it = shard != nullptr || (shards[u].empty() && !shards[u].frozen);
    if (has_it) exporter.add(shards[u], shard, visit);
  }
  exporter.end();
}

/// Exports the parameters that units keep: master weights, and those of frozen units. bf16 and fp16 come as the fp32 of
/// the same value. See export_shards.
/// @note Collective: yes; blocks the calling thread.
template <class E, class Visit>
void export_full(E& engine, Visit&& visit) {
  auto const shards = engine.shards();
  auto const entry = shards.enter("an export");
  using Exporter = detail::ShardExporter<E>;
  Exporter::begin(engine);
  std::size_t element = 0;
  for (std::size_t u = 0; u < shards.size(); ++u) element = std::max(element, size_of(shards[u].types().master));
  Exporter exporter(engine, element);
  for (std::size_t u = 0; u < shards.size(); ++u)
    shards[u].with_shard([&](auto* shard) { exporter.add(shards[u], shard, visit); });
  exporter.end();
}

/// Exports the reduced gradients of units that are not frozen, averaged over the world: those of the last step once
/// reductions are complete.
/// @throws UsageError if there are none: before the first backward pass, after discard_gradients(), or while some wait
/// unreduced
/// @note Collective: yes; blocks the calling thread.
template <class E, class Visit>
void export_gradients(E& engine, Visit&& visit) {
  auto const entry = engine.shards().enter("export_gradients");
  engine.shards().checks().expect_readable("gradients are to be exported");
  engine.shards().passes().complete_gradients();
  engine.synchronize();
  export_shards(
      engine,
      [passes = &engine.shards().passes()](typename E::Unit& unit) {
        return passes->exports_gradient(unit.index()) ? unit.gradient : nullptr;
      },
      visit);
}

namespace detail {

/// Copies fp32 values into an array, rounded to nearest even where it is narrower.
template <class T, class E>
void put_values(E& engine, T* to, std::span<float const> values) {
  std::vector<T> rounded;
  void const* from = values.data();
  if constexpr (!std::is_same_v<T, float>) {
    rounded.reserve(values.size());
    for (auto const value : values) rounded.push_back(narrow<T>(value));
    from = rounded.data();
  }
  engine.device().copy_async(engine.compute(), to, from, values.size() * sizeof(T));
  engine.device().synchronize(engine.compute());
}

}  // namespace detail

/// Calls `read(TensorInfo const&, std::int64_t first, std::span<float> out)` for every part of a tensor that this rank
/// keeps and copies `out` into the shard, rounded to nearest even where masters are narrower. If `read` returns false,
/// the part stays as it is, on all ranks: adapters that the weights do not have. Ranks that keep the same
/// part (replicas) must be given the same values, and compare a hash of them.
/// @throws UsageError in the middle of a backward pass; ConfigError on every rank if replicas were given different
/// values. After that, and after an exception from `read`, all but another import or a load is refused
/// @note Collective: yes; blocks the calling thread.
template <class E, class Read>
void import_shard(E& engine, Read&& read) {
  auto const shards = engine.shards();
  auto const entry = shards.enter("import_shard");
  engine.seal();
  shards.abandon_pass("parameters are to be imported");
  engine.synchronize();
  shards.passes().begin_replacing("an import");
  shards.history().add("import_shard");
  detail::WrittenValues written(shards.size());
  checkpoint::ReadParts parts;
  std::vector<float> values;
  std::size_t first_tensor = 0;  // of the unit
  for (std::size_t u = 0; u < shards.size(); ++u) {
    auto& unit = shards[u];
    auto const writing = shards.write(unit);
    for (auto const& part : unit.layout().segments(unit.shard())) {
      values.resize(static_cast<std::size_t>(part.count));
      auto const& tensor = unit.layout().tensors()[part.tensor];
      if constexpr (std::is_same_v<decltype(read(tensor, part.first, std::span<float>(values))), bool>) {
        bool const is_read = read(tensor, part.first, std::span<float>(values));
        parts.add(first_tensor + part.tensor, is_read);
        if (!is_read) continue;
      } else {
        read(tensor, part.first, std::span<float>(values));
      }
      written.add(u, std::as_bytes(std::span(values)));
      unit.with_shard([&](auto* shard) { detail::put_values(engine, shard + part.offset, values); });
    }
    first_tensor += unit.layout().tensors().size();
  }
  if constexpr (std::is_same_v<decltype(read(std::declval<TensorInfo const&>(), 0, std::span<float>())), bool>)
    parts.expect_whole_tensors(engine);
  auto const differing =
      comm::ask_first_rank(engine.world(), written.text(), "imported values", [&](auto const& texts) {
        return detail::differing_replicas(
            texts, shards.size(), [&](std::size_t u) -> auto& { return shards[u]; }, "imported values");
      });
  if (!differing.empty()) fail<ConfigError>("rank {}: {}", engine.rank(), differing);
  shards.passes().end_replacing();
}

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE
