// SPDX-License-Identifier: Apache-2.0
// A step as a list of operations. Each names a primitive, a stream, and the cells of buffers that it accesses. Nothing
// names a wait: waits follow from accesses.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <span>
#include <string_view>
#include <vector>

#include "fsdp/step/program.hpp"
#include "fsdp/trace/trace.hpp"

namespace fsdp::step {

/// Buffers of one kind.
enum class Pool : unsigned char {
  master,         ///< by unit: master shard
  moments,        ///< by unit: optimizer state
  gradient,       ///< by unit: gradient shard
  partial,        ///< by unit: sum over the shard group, which waits for the other replicas
  accumulator,    ///< by unit: full gradients of earlier micro-steps, which wait on their rank
  gather,         ///< by slot: full parameters
  kept,           ///< by slot: a slice of the parameters, which stays after forward
  gradient_slot,  ///< by slot: full gradients
  wire,           ///< by slot: full gradients, rounded
  count_
};
inline constexpr auto pools = static_cast<std::size_t>(Pool::count_);

constexpr std::string_view name(Pool pool) {
  constexpr std::array<std::string_view, pools> names{"master shard", "moments",       "gradient shard",
                                                      "partial sum",  "accumulator",   "gather slot",
                                                      "kept slice",   "gradient slot", "wire"};
  return names[static_cast<std::size_t>(pool)];
}

/// Consecutive cells of a pool. A cell is a part of a buffer that some operation accesses alone: see Buffers.
struct Cells {
  Pool pool{};
  std::uint32_t first = 0, count = 0;
  friend bool operator==(Cells const&, Cells const&) = default;
};

enum class Mode : unsigned char { read, write, add };  ///< add: reads and writes
constexpr std::string_view name(Mode mode) {
  constexpr std::array<std::string_view, 3> names{"read", "write", "add"};
  return names[static_cast<std::size_t>(mode)];
}

struct Access {
  Cells cells;
  Mode mode{};
};

enum class Primitive : unsigned char {
  open,            ///< a buffer by slot gets a new content; moves nothing
  close,           ///< nothing reads the content any more; moves nothing, waits for nothing
  cast,            ///< master shard to the own slice of full parameters
  copy,            ///< parameters to a kept slice
  zero,            ///< all of a buffer, beyond its content too
  zero_padding,    ///< elements that no tensor of the unit covers
  accumulate,      ///< gradients to a wider buffer that holds their sum
  add,             ///< a sum to full gradients
  round,           ///< gradients to a wire
  all_gather,      ///< in place, or from a kept slice
  reduce_scatter,  ///< in place
  all_reduce,      ///< in place
  forward,         ///< a module's kernels
  backward,        ///< a module's kernels
  norm,            ///< measures a gradient shard
  update,          ///< an optimizer's kernel
  discard,         ///< gradients since the last update are forgotten; moves nothing, waits for nothing
  count_
};
inline constexpr auto primitives = static_cast<std::size_t>(Primitive::count_);

constexpr std::string_view name(Primitive primitive) {
  constexpr std::array<std::string_view, primitives> names{
      "open",       "close",    "cast",  "copy",       "zero",           "zero padding",
      "accumulate", "add",      "round", "all-gather", "reduce-scatter", "all-reduce",
      "forward",    "backward", "norm",  "update",     "discard"};
  return names[static_cast<std::size_t>(primitive)];
}
/// A device or a communicator does it.
constexpr bool moves(Primitive primitive) {
  return primitive != Primitive::open && primitive != Primitive::close && primitive != Primitive::discard;
}
/// Its accesses are ordered with those of other operations. So is the open of a content, because the cells of a new
/// content are other bytes than the cells of the last one.
constexpr bool is_ordered(Primitive primitive) { return moves(primitive) || primitive == Primitive::open; }
constexpr bool is_collective(Primitive primitive) {
  return primitive == Primitive::all_gather || primitive == Primitive::reduce_scatter ||
         primitive == Primitive::all_reduce;
}
/// Peers of a collective read the cells of this access. A reduce-scatter adds to the own slice, which no peer reads.
constexpr bool peers_read(Primitive primitive, Access const& access) {
  return is_collective(primitive) && (access.mode == Mode::read || primitive == Primitive::all_reduce);
}

/// A communicator.
enum class Group : unsigned char {
  none,
  gather,        ///< the shard group, for parameters
  kept,          ///< the ranks among which kept slices are gathered
  reduce,        ///< the shard group, for gradients
  replicas,      ///< ranks of equal place in each shard group
  all_replicas,  ///< all ranks, for units that every rank keeps whole
  count_
};

/// Where an operation stands in a run.
struct Position {
  static constexpr std::uint32_t no_use = ~0u;

  std::uint32_t step = 0;        ///< updates so far
  std::uint32_t micro_step = 0;  ///< number of the backward pass in the run, from 1; a forward pass has the next one's
  std::uint32_t use = no_use;    ///< no_use: between uses
  Phase phase{};                 ///< of the use
};

struct Operation {
  static constexpr std::uint32_t none = ~0u;

  Primitive primitive{};
  StreamKind stream{};
  Group group = Group::none;    ///< of a collective
  bool mean = false;            ///< all_reduce: makes a mean of the sum
  int ranks = 1;                ///< of the group
  std::uint32_t unit = none;    ///< of a bucket: the unit that completes it
  std::uint32_t bucket = none;  ///< whose gradients it moves; none: one unit's
  std::int64_t bytes = 0;       ///< that it writes; of a collective: of the whole buffer
  std::uint32_t first = 0;      ///< index of its first access in the list
  std::uint32_t accesses = 0;   ///< number of them
  Position at{};
};

/// Operations in the order in which a rank enqueues them. The same on all ranks.
struct List {
  std::vector<Operation> operations;
  std::vector<Access> accesses;

  std::span<Access const> of(Operation const& operation) const {
    return std::span(accesses).subspan(operation.first, operation.accesses);
  }
  std::span<Access> of(Operation const& operation) {
    return std::span(accesses).subspan(operation.first, operation.accesses);
  }
  Operation& add(Operation operation, std::initializer_list<Access> of) {
    operation.first = static_cast<std::uint32_t>(accesses.size());
    operation.accesses = static_cast<std::uint32_t>(of.size());
    accesses.insert(accesses.end(), of);
    return operations.emplace_back(operation);
  }
};

}  // namespace fsdp::step
