// SPDX-License-Identifier: Apache-2.0
// An operation of a step: a primitive, a stream, the flags of micro-steps under which it runs, and the cells of
// buffers that it accesses. Operations name no waits: these follow from accesses (hazards.hpp).
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <span>
#include <string_view>

#include "fsdp/detail/base/streams.hpp"
#include "fsdp/version.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE {

/// Flags of a micro-step, in four groups: how forward begins, how backward ends, over which ranks gradients are
/// reduced, and what of earlier micro-steps waits. A micro-step has one bit of each group. A forward pass has those of
/// the first and the last group alone, and a backward pass all but the first, since nothing in it depends on the
/// others. An operation lists the flags under which it runs, and all bits of each group on which it does not depend: it
/// runs if it lists every bit that the pass has.
enum StepFlags : unsigned {
  starts_sharded = 1u << 0,    ///< forward begins without parameters of an earlier backward pass
  starts_unsharded = 1u << 1,  ///< forward begins with all of them
  reshards = 1u << 2,          ///< backward drops parameters
  stays_unsharded = 1u << 3,   ///< backward leaves them
  syncs_none = 1u << 4,        ///< gradients stay on their rank
  syncs_group = 1u << 5,       ///< gradients are reduced within shard groups
  syncs_all = 1u << 6,         ///< gradients are reduced over all ranks
  all_reduced = 1u << 7,       ///< all gradients of earlier micro-steps are reduced
  group_sums_wait = 1u << 8,   ///< sums within shard groups wait for replicas
  gradients_wait = 1u << 9,    ///< gradients of earlier micro-steps are unreduced; sums may also wait for replicas
  any_flags = (1u << 10) - 1
};
using Facts [[deprecated("write StepFlags")]] = StepFlags;
[[deprecated("write any_flags")]] inline constexpr StepFlags any_facts = any_flags;
constexpr StepFlags operator~(StepFlags a) { return static_cast<StepFlags>(~unsigned{a} & unsigned{any_flags}); }
constexpr StepFlags operator|(StepFlags a, StepFlags b) { return static_cast<StepFlags>(unsigned{a} | unsigned{b}); }
constexpr StepFlags operator&(StepFlags a, StepFlags b) { return static_cast<StepFlags>(unsigned{a} & unsigned{b}); }
/// The bits of each group.
inline constexpr StepFlags start_flags = starts_sharded | starts_unsharded, reshard_flags = reshards | stays_unsharded,
                           sync_flags = syncs_none | syncs_group | syncs_all,
                           waiting_flags = all_reduced | group_sums_wait | gradients_wait;
inline constexpr std::array<unsigned, 4> flag_groups{start_flags, reshard_flags, sync_flags, waiting_flags};
/// @return a mask: in a group that `flags` names, only those flags; in all other groups, every flag
constexpr StepFlags only_if(StepFlags flags) {
  unsigned all = 0;
  for (auto const group : flag_groups) all |= (flags & group) != 0 ? flags & group : group;
  return static_cast<StepFlags>(all);
}
/// A micro-step that begins and ends with sharded parameters and reduces its gradients, after one like it.
inline constexpr StepFlags plain_step = starts_sharded | reshards | syncs_all | all_reduced;
/// Flags that a micro-step sets for the next one.
constexpr StepFlags flags_after(StepFlags flags) {
  return ((flags & stays_unsharded) != 0 ? starts_unsharded : starts_sharded) |
         ((flags & syncs_none) != 0    ? gradients_wait
          : (flags & syncs_group) != 0 ? group_sums_wait
                                       : all_reduced);
}

/// A scope of an engine that changes backward passes. The first three clear one of the flags below while they are open.
enum class BackwardChange : unsigned char { no_sync, no_replica_sync, keep_unsharded, frozen_parameters };
inline constexpr std::size_t backward_changes = 4;

constexpr char const* name(BackwardChange change) {
  constexpr std::array<char const*, backward_changes> names{"no_sync", "no_replica_sync", "keep_unsharded",
                                                            "frozen_parameters"};
  return names[static_cast<std::size_t>(change)];
}

/// Flags of a backward pass, which decide what happens to a unit at its end. Scopes set them when the pass begins.
struct BackwardFlags {
  bool gradient_sync = true;  ///< reduces gradients
  bool replica_sync = true;   ///< reduces over replicas too
  bool reshard = true;        ///< drops parameters

  constexpr StepFlags step_flags() const {
    return (reshard ? reshards : stays_unsharded) | (!gradient_sync ? syncs_none
                                                     : replica_sync ? syncs_all
                                                                    : syncs_group);
  }
};
/// The flags of all kinds of backward passes.
inline constexpr std::array<BackwardFlags, 6> every_backward_flags{{{true, true, true},
                                                                    {true, false, true},
                                                                    {false, true, true},
                                                                    {true, true, false},
                                                                    {true, false, false},
                                                                    {false, true, false}}};

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE

namespace fsdp::inline FSDP_VERSION_NAMESPACE::step {

/// Kinds of buffers.
enum class Pool : unsigned char {
  master,           ///< by unit: master shard
  moments,          ///< by unit: optimizer state
  gradient,         ///< by unit: gradient shard
  partial,          ///< by unit: sum over the shard group, before the sum over replicas
  accumulator,      ///< by unit: unreduced full gradients of earlier micro-steps
  gather,           ///< by slot: full parameters
  kept_slice,       ///< by slot: the slice of the parameters that stays after forward
  gradient_slot,    ///< by slot: full gradients
  wire,             ///< by slot: full gradients, rounded
  offloaded,        ///< by unit: master shard and optimizer state in host memory
  staged,           ///< by slot, in device memory: master shard and optimizer state during the unit's update
  staged_gradient,  ///< by slot, in device memory: a gradient shard that is kept in host memory
  count_
};
inline constexpr auto pools = static_cast<std::size_t>(Pool::count_);

inline constexpr std::array<std::string_view, pools> pool_names{
    "master shard", "moments",       "gradient shard", "partial sum",     "accumulator",  "gather slot",
    "kept slice",   "gradient slot", "wire",           "offloaded state", "staged state", "staged gradient"};
constexpr std::string_view name(Pool pool) { return pool_names[static_cast<std::size_t>(pool)]; }
static_assert(!name(static_cast<Pool>(pools - 1)).empty(), "a pool lacks its name");

/// Consecutive cells of a pool. A cell is a part of a buffer that some operation accesses alone: see Buffers.
struct Cells {
  Pool pool{};
  std::uint32_t first = 0, count = 0;
  friend bool operator==(Cells const&, Cells const&) = default;
};

enum class Mode : unsigned char {
  read,
  write,
  add,  ///< reads and writes
  sum   ///< the first term of a sum is written, further terms are added
};
constexpr std::string_view name(Mode mode) {
  constexpr std::array<std::string_view, 4> names{"read", "write", "add", "sum"};
  return names[static_cast<std::size_t>(mode)];
}

struct Access {
  Cells cells;
  Mode mode{};
  friend bool operator==(Access const&, Access const&) = default;
};

enum class Primitive : unsigned char {
  open,            ///< a buffer gets a new content and counts as in use; moves nothing
  close,           ///< the content is not used any more; moves nothing, waits for nothing
  cast,            ///< master shard to the own slice of full parameters
  copy,            ///< a slice of full parameters to a kept slot
  zero,            ///< all bytes of a slot, or a gradient shard
  zero_padding,    ///< elements that no tensor of the unit covers
  accumulate,      ///< gradients to a buffer of fp32 that holds their sum
  add,             ///< a sum in fp32 to full gradients
  round,           ///< gradients to a wire
  all_gather,      ///< in place, or from a kept slice
  reduce_scatter,  ///< in place
  all_reduce,      ///< in place
  hook,            ///< functions of the caller on a reduced gradient shard: see Shards::on_reduced
  forward,         ///< a module's kernels
  recompute,       ///< a module's kernels of forward, in a backward pass
  backward,        ///< a module's kernels
  norm,            ///< measures a gradient shard
  update,          ///< an optimizer's kernel
  discard,         ///< all gradients since the last update are forgotten; moves nothing, waits for nothing
  fetch,           ///< from host memory to a staging slot
  store,           ///< from a staging slot to host memory
  count_
};
inline constexpr auto primitives = static_cast<std::size_t>(Primitive::count_);

inline constexpr std::array<std::string_view, primitives> primitive_names{
    "open",      "close",    "cast",       "keep slice",     "zero",       "zero padding", "accumulate",
    "add",       "round",    "all-gather", "reduce-scatter", "all-reduce", "hook",         "forward",
    "recompute", "backward", "norm",       "update",         "discard",    "fetch",        "store"};
constexpr std::string_view name(Primitive primitive) { return primitive_names[static_cast<std::size_t>(primitive)]; }
static_assert(!name(static_cast<Primitive>(primitives - 1)).empty(), "a primitive lacks its name");
/// Whether a device or a communicator performs the primitive.
constexpr bool moves(Primitive primitive) {
  return primitive != Primitive::open && primitive != Primitive::close && primitive != Primitive::discard;
}
/// Whether the primitive stands for a module's kernels. They run between the operations before and after them.
constexpr bool computes(Primitive primitive) {
  return primitive == Primitive::forward || primitive == Primitive::recompute || primitive == Primitive::backward;
}
/// Whether the primitive's accesses are ordered with those of other operations. `open` is ordered too: after it, the
/// same cells have other addresses.
constexpr bool is_ordered(Primitive primitive) { return moves(primitive) || primitive == Primitive::open; }
constexpr bool is_collective(Primitive primitive) {
  return primitive == Primitive::all_gather || primitive == Primitive::reduce_scatter ||
         primitive == Primitive::all_reduce;
}
/// Whether peers of a collective read the cells of this access. A reduce-scatter adds to the own slice, which no peer
/// reads.
constexpr bool peers_read(Primitive primitive, Access const& access) {
  return is_collective(primitive) && (access.mode == Mode::read || primitive == Primitive::all_reduce);
}

/// Group of a communicator.
enum class Group : unsigned char {
  none,
  gather,        ///< the shard group, for parameters
  kept,          ///< the ranks among which kept slices are gathered; a part of the shard group
  reduce,        ///< the shard group, for gradients
  replicas,      ///< ranks of equal place in each shard group
  all_replicas,  ///< all ranks, for units that every rank keeps whole
  count_
};
inline constexpr auto groups = static_cast<std::size_t>(Group::count_);

/// Whether the ranks of `part` are among those of `whole`, and both communicators enqueue on one stream.
constexpr bool contains(Group whole, Group part) {
  return whole == part || (whole == Group::gather && part == Group::kept) ||
         (whole == Group::all_replicas && part == Group::replicas);
}

/// Who accesses a cell: a bit for each stream of this rank, and one for peers.
using Accessors = std::uint8_t;
constexpr Accessors accessor(StreamKind stream) { return static_cast<Accessors>(1u << static_cast<unsigned>(stream)); }
inline constexpr Accessors peers = 1u << stream_kinds, all_accessors = 2 * peers - 1;

/// A span of a trace: consecutive operations of one stream.
struct Span {
  Primitive name = Primitive::count_;  ///< of the span that begins here; count_: none begins
  bool ends = false;                   ///< the span that is open ends here
  std::int64_t bytes = 0;              ///< of the span that begins here
};

/// A condition on the contents of a unit's buffers. Micro-steps of several paths may leave sums of some units unreduced
/// and not those of others, which the flags of a micro-step do not say.
enum class Condition : unsigned char {
  always,
  none_waits,  ///< no gradients of earlier micro-steps wait in a slot
  opened,      ///< backward has got a slot, and has written nothing to it
  sum_waits    ///< a sum waits in the accumulator
};

/// A primitive on a stream. Operations are equal on all ranks; only the addresses of their cells differ.
struct Operation {
  static constexpr std::uint32_t none = ~0u;

  Primitive primitive{};
  StreamKind stream{};
  Group group = Group::none;  ///< of a collective
  bool mean = false;          ///< all_reduce: makes a mean of the sum
  bool beside = false;        ///< accesses of the computation before it to a further unit
  bool unless_begun = false;  ///< runs only if the unit's gradient shard holds no sum since the last update
  bool if_begun = false;      ///< runs only if it holds one
  Condition condition = Condition::always;  ///< runs only if this holds
  std::uint8_t size = 0;                    ///< number of accesses
  StepFlags when = any_flags;               ///< flags of a micro-step under which it runs
  StepFlags records{};          ///< flags under which an event is recorded after it, for another stream's wait
  int ranks = 1;                ///< of the group
  std::uint32_t unit = none;    ///< for a bucket, the unit that completes it
  std::uint32_t bucket = none;  ///< the bucket whose gradients it moves; none: one unit's
  std::int64_t elements = 0;    ///< moved elements; for all_gather and reduce_scatter, of a rank's part
  /// Bytes written. Computations: bytes of parameters read. Collectives: of the whole buffer. open: of the content.
  /// update: of a shard in fp32. 0 for zero_padding and norm.
  std::int64_t bytes = 0;
  std::array<Access, 3> all{};
  /// For each access, the other streams and the peers that may have to wait for it, or it for them: all that access the
  /// same cells; of a read, those that write them. An access without any needs no book-keeping.
  std::array<Accessors, 3> conflicts{};
  Span span{};

  constexpr bool runs(StepFlags flags) const { return (unsigned{flags} & ~unsigned{when}) == 0; }
  constexpr bool is_recorded(StepFlags flags) const { return (unsigned{flags} & ~unsigned{records}) == 0; }
  std::span<Access const> accesses() const { return {all.data(), size}; }
  std::span<Access> accesses() { return {all.data(), size}; }
  /// Whether an access of the operation conflicts with one of another stream or of peers.
  constexpr bool has_conflicts() const { return (conflicts[0] | conflicts[1] | conflicts[2]) != 0; }
  /// Whether others may have to wait for the operation.
  constexpr bool may_be_awaited() const { return moves(primitive) && has_conflicts(); }
  constexpr std::uint8_t stream_index() const { return static_cast<std::uint8_t>(stream); }

  // Sets sizes, for code that makes operations.
  constexpr Operation& moving(std::int64_t moved_elements, std::int64_t written_bytes) {
    elements = moved_elements;
    bytes = written_bytes;
    return *this;
  }
  constexpr Operation& among(Group members, int members_count) {
    group = members;
    ranks = members_count;
    return *this;
  }
  constexpr Operation& beginning_span(Primitive name, std::int64_t span_bytes) {
    span.name = name;
    span.bytes = span_bytes;
    return *this;
  }
  constexpr Operation& ending_span() {
    span.ends = true;
    return *this;
  }
};

/// Makes an operation without sizes. It is one function, because compilers would otherwise copy it into each place that
/// writes an operation.
/// @param accesses  at most three
[[gnu::noinline]] inline Operation make_operation(Primitive primitive, StreamKind stream, std::uint32_t unit,
                                                  std::initializer_list<Access> accesses, StepFlags when = any_flags) {
  Operation operation;
  operation.primitive = primitive;
  operation.stream = stream;
  operation.unit = unit;
  operation.when = when;
  for (auto const& access : accesses) operation.all[operation.size++] = access;
  return operation;
}

constexpr Access reads(Cells cells) { return {cells, Mode::read}; }
constexpr Access writes(Cells cells) { return {cells, Mode::write}; }
constexpr Access adds(Cells cells) { return {cells, Mode::add}; }
constexpr Access sums(Cells cells) { return {cells, Mode::sum}; }

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE::step
