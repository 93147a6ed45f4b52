// SPDX-License-Identifier: Apache-2.0
// Options of an engine, and ids of units and uses.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include "fsdp/strategy.hpp"
#include "fsdp/tensor.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE {

namespace detail {
#if defined(__SANITIZE_ADDRESS__)
inline constexpr bool address_sanitizer = true;
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
inline constexpr bool address_sanitizer = true;
#else
inline constexpr bool address_sanitizer = false;
#endif
#else
inline constexpr bool address_sanitizer = false;
#endif
}  // namespace detail

/// Treatment of a unit that has no gradient at an optimizer step, because all backward passes since the last step
/// followed paths that leave it out (fsdp/paths.hpp).
enum class WithoutGradient : unsigned char {
  refused,    ///< the step throws
  untouched,  ///< the step leaves the unit as it is: parameters, moments, decay; norms leave it out
  zeros       ///< its gradient is zero: moments and weights decay
};

/// Settings of a whole engine, for its constructor: prefetch, resharding, optional buffers, debugging.
struct EngineOptions {
  int prefetch = 1;                        ///< units gathered ahead of the one that computes
  std::optional<int> backward_prefetch{};  ///< the number in backward; not set: `prefetch`
  std::int64_t max_ahead_bytes = 0;        ///< cap on the bytes of units gathered ahead of their use; 0: none
  bool keep_last = true;  ///< after forward, keep the last unit that would be resharded: backward begins with it
  /// Keep a unit that is used again after others (a tied root) from its first use in forward to its last in backward.
  bool keep_root = true;
  /// After forward, keep units sharded over this many consecutive ranks; backward gathers among these. More than 1,
  /// fewer than the ranks of the shard group, a divisor of them. 0: as the strategy says.
  int reshard_ranks = 0;
  bool allow_keep_unsharded = false;   ///< allocates the buffers that keep_unsharded() needs: one for every unit
  bool allow_no_sync = false;          ///< allocates the buffers that no_sync() needs: full gradients
  bool allow_no_replica_sync = false;  ///< HybridShard: allocates what no_replica_sync() needs: one more shard in fp32
  /// Plans the passes of frozen_parameters(). If some module writes all gradients that it has (see SkipsGradients),
  /// allocates a buffer of the largest such unit.
  bool allow_frozen_parameters = false;
  std::int64_t bucket_bytes = 25 << 20;       ///< NoShard: bytes per all-reduce
  std::int64_t first_bucket_bytes = 1 << 20;  ///< NoShard: bytes of the first all-reduce of a backward pass
  int passes_ahead = 4;       ///< passes over the modules that the host may be ahead of compute; at least 1
  std::uint64_t seed = 1337;  ///< seeds the initial parameters
  /// The type in which ranks sum gradients. Not set: the type that backward writes (Precision's Reduce). If that is
  /// fp32, bf16 and fp16 are possible too: each rank then rounds its gradients once before they are sent.
  std::optional<DType> reduce_dtype{};
  /// For debugging, on the host: a use of a pointer to parameters or gradients outside its scope becomes a segmentation
  /// fault, which AddressSanitizer reports. Each use gets copies of its unit's buffers, at addresses that no other unit
  /// gets; the account does not count the copies. On CUDA it has no effect.
  bool trap_stale_pointers = detail::address_sanitizer;
  WithoutGradient without_gradient = WithoutGradient::refused;  ///< for engines with paths
};

/// Settings of one unit, for Engine::add_unit and Engine::shard.
struct UnitOptions {
  std::optional<ShardingStrategy> strategy{};  ///< not set: the engine's
  /// The unit does not train: it has no gradients, no optimizer state, no reductions, and norms leave it out. A
  /// backward pass ends at the lowest use of a unit that trains.
  bool frozen = false;
};

/// Id of a unit that several modules share. Engine::add_unit returns it; by default it names none.
struct UnitId {
  std::size_t index = static_cast<std::size_t>(-1);  ///< number of the unit in its engine, from 0; -1: none
  void const* engine = nullptr;  ///< engine of the unit; other engines refuse the id. nullptr: not checked
};
/// Id of a module's use in the declared order. By default it names none.
struct UseId {
  std::size_t index = static_cast<std::size_t>(-1);  ///< number of the use in the declared order, from 0; -1: none
  void const* engine = nullptr;  ///< engine of the use; other engines refuse the id. nullptr: not checked
};
/// Id of a path of Engine::add_path; by default, the declared order.
struct PathId {
  std::size_t index = 0;         ///< number of the path, from 1; 0: the declared order
  void const* engine = nullptr;  ///< engine of the path; other engines refuse the id. nullptr: not checked
};

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE
