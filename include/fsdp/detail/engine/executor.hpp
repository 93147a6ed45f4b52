// SPDX-License-Identifier: Apache-2.0
// Runs the operations of a program on one rank: orders their accesses, performs each primitive, remembers its accesses.
// The program decides everything else.
#pragma once

#include <array>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "fsdp/concepts.hpp"
#include "fsdp/detail/engine/agreement.hpp"
#include "fsdp/detail/engine/callbacks.hpp"
#include "fsdp/detail/engine/flat_param.hpp"
#include "fsdp/detail/engine/waits.hpp"
#include "fsdp/detail/kernels/elementwise.hpp"
#include "fsdp/detail/step/contents.hpp"
#include "fsdp/detail/step/memory_plan.hpp"
#include "fsdp/detail/step/passes.hpp"
#include "fsdp/detail/step/program.hpp"
#include "fsdp/detail/trace/trace.hpp"
#include "fsdp/error.hpp"
#include "fsdp/layout.hpp"
#include "fsdp/memory.hpp"
#include "fsdp/tensor.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE::detail {

/// The operations of a reduction, for one type of element. All are enqueued on the stream that they are given.
template <Communicator C>
struct GradientSums {
  using D = typename C::Device;
  using Stream = typename D::Stream;

  /// Rounds: out[i] = in[i], to nearest even. Where gradients are rounded.
  void (*round)(D const&, Stream&, float const* in, void* out, std::int64_t n) = nullptr;
  /// Gives slice `own` of the sum over ranks of `full`, in place.
  Ticket (*reduce_scatter)(C&, Stream&, void* full, Range own, Label) = nullptr;
  /// Sums over ranks, in place.
  Ticket (*all_reduce)(C&, Stream&, void* data, std::int64_t count, Label) = nullptr;
  /// Adds to fp32: see kernels::accumulate.
  void (*accumulate)(D const&, Stream&, void const* in, float* out, std::int64_t n, float scale,
                     bool overwrite) = nullptr;

  template <class T>
  static constexpr GradientSums of() {
    return {nullptr, reduce_scatter_of<T>, all_reduce_of<T>, accumulate_of<T>};
  }
  /// The operations for a type that fp32 gradients may be rounded to.
  /// @throws ConfigError if the communicator sums no such elements
  [[gnu::cold]] static GradientSums narrow(DType type, C const& world) {
    if constexpr (Sums<C, bf16>)
      if (type == DType::bf16 && takes_sums<bf16>(world)) return rounded_to<bf16>();
    if constexpr (Sums<C, fp16>)
      if (type == DType::f16 && takes_sums<fp16>(world)) return rounded_to<fp16>();
    fail<ConfigError>("rank {}: reduce_dtype {}: the communicator's reduce_scatter and all_reduce do not take {}",
                      world.rank(), fsdp::name(type), fsdp::name(type));
  }

 private:
  template <class T>
  static constexpr GradientSums rounded_to() {
    auto sums = of<T>();
    sums.round = round_to<T>;
    return sums;
  }
  template <class T>
  static void round_to(D const& device, Stream& stream, float const* in, void* out, std::int64_t n) {
    kernels::cast(device, stream, in, static_cast<T*>(out), n);
  }
  template <class T>
  static Ticket reduce_scatter_of(C& comm, Stream& stream, void* full, Range own, Label label) {
    return comm.reduce_scatter(stream, static_cast<T const*>(full), static_cast<T*>(full) + own.begin,
                               static_cast<std::size_t>(own.size()), label);
  }
  template <class T>
  static Ticket all_reduce_of(C& comm, Stream& stream, void* data, std::int64_t count, Label label) {
    return comm.all_reduce(stream, static_cast<T const*>(data), static_cast<T*>(data), static_cast<std::size_t>(count),
                           label);
  }
  template <class T>
  static void accumulate_of(D const& device, Stream& stream, void const* in, float* out, std::int64_t n, float scale,
                            bool overwrite) {
    kernels::accumulate(device, stream, static_cast<T const*>(in), out, n, scale, overwrite);
  }
};

/// Addresses of the buffers by slot, and of all gradient shards that backward writes.
struct SlotMemory {
  std::array<FixedArray<std::byte*>, step::pools> slots;
  float* gradients = nullptr;  ///< in the order of Program::gradient_order
};

/// The performer of an engine's passes: see step::Passes.
template <Communicator C, class P>
class Executor {
 public:
  using D = typename C::Device;
  using Stream = typename D::Stream;
  using Unit = FlatParam<P>;
  using Param = typename P::Param;
  using Master = typename P::Master;
  using Reduce = typename P::Reduce;
  using Operation = step::Operation;

  /// @param passes_ahead  see EngineOptions
  /// @param wire          the type that fp32 gradients are rounded to for the sum over ranks; not set: none
  /// @throws ConfigError if the communicator does not sum this type or that of gradients
  [[gnu::cold]] Executor(C const& world, Streams<D>& streams, MemoryAccount& account, History& history,
                         int passes_ahead, std::optional<DType> wire)
      : device_(world.device()),
        streams_(&streams),
        account_(&account),
        history_(&history),
        rounded_(wire ? Sums::narrow(*wire, world) : Sums{}),
        waits_(device_, streams, groups_) {
    if (!takes_sums<Reduce>(world))
      fail<ConfigError>("rank {}: gradients are {}, which the communicator's reduce_scatter and all_reduce do not take",
                        world.rank(), fsdp::name(dtype_of<Reduce>));
    for (int pass = 0; pass < passes_ahead; ++pass) begun_.push_back(device_.make_event());
  }

  /// Collectives of `group` run on the communicator.
  [[gnu::cold]] void set_communicator(step::Group group, C communicator) {
    groups_[static_cast<std::size_t>(group)].emplace(std::move(communicator));
    if (group == step::Group::replicas || group == step::Group::all_replicas) streams_->add_replicate(device_);
  }
  C& communicator(step::Group group) { return *groups_[static_cast<std::size_t>(group)]; }
  /// Registers memory with the communicator of a group, if it has register_memory.
  /// @note Collective: yes, over that communicator.
  [[gnu::cold]] void register_memory(step::Group group, AccountedMemory<C> const& memory) {
    register_with(groups_[static_cast<std::size_t>(group)], memory);
  }
  void attach(Tracer<D>* tracer) { trace_.attach(tracer); }

  /// Units and buffers are placed.
  /// @param program  must outlive the executor, as `units` and `paths` must
  /// @param paths    nullptr: there is none besides the declared order
  /// @param member   this rank's place among those that gather kept slices
  template <class Units>
  [[gnu::cold]] void prepare(Program const& program, Units const& units, PathList const* paths, SlotMemory memory,
                             int member) {
    paths_ = paths;
    program_ = &program;
    memory_ = std::move(memory);
    kept_member_ = member;
    live_ = LiveBytes(program);
    waits_.prepare(program);
    units_ = FixedArray<Unit*>(units.size());
    for (std::size_t u = 0; u < units.size(); ++u) {
      units_[u] = units[u].get();
      if (program.units[u].reads_masters) units_[u]->full = units_[u]->gathered;
    }
  }

  /// Undoes prepare() and set_communicator(): sealing has failed. @pre all streams have run dry
  [[gnu::cold]] void release() noexcept {
    live_ = {}, units_ = {}, memory_ = {};
    for (auto& group : groups_) group.reset();
  }

  // A performer of step::Passes has the following members.

  /// [Note: How far the host runs ahead] At the start of a pass, the host waits until at most `passes_ahead` earlier
  /// passes are incomplete. This bounds the queues, also in evaluation. Compute waits for gathers and for free slots,
  /// so the other queues are bounded too.
  void begin_pass(step::RunPosition const& at) {
    auto& begun = begun_[passes_ % begun_.size()];
    if (passes_ >= begun_.size()) device_.synchronize(begun);
    device_.record(begun, (*streams_)[StreamKind::compute]);
    ++passes_;
    if (at.path != path_) history_->add(paths_->label(path_ = at.path));
    waits_.set_flags(at.flags);
  }
  /// @note Stream: the operation's stream waits for what its accesses need
  /// @note Collective: those of the operation
  void perform(Operation const& operation, step::RunPosition const& at, step::Contents const& contents) {
    waits_.order(operation);
    Ticket ticket;
    try {
      ticket = enqueue(operation, at, contents);
    } catch (...) {
      waits_.remember_interrupted(operation);
      span_ = {};
      throw;
    }
    waits_.remember(operation, ticket);
  }
  /// @note Stream: compute waits for the parameters and gradients that the module's kernels access
  void begin_compute(Program::Turn const& turn) {
    waits_.order(turn.compute);
    for (auto const& operation : turn.beside) waits_.order(operation);
  }
  void computed(Operation const& operation, step::RunPosition const&, step::Contents const&) {
    waits_.remember(operation);
  }
  void interrupted(Program::Turn const& turn) {
    waits_.remember_interrupted(turn.compute);
    for (auto const& operation : turn.beside) waits_.remember_interrupted(operation);
  }
  void end_pass(step::RunPosition const& at) {
    if (at.kind == PassKind::frozen_backward) return history_->add("pass without gradients");
    // Replicas make no collective in such a micro-step: only their histories tell how many they have made.
    if (at.kind == PassKind::backward && (at.flags & syncs_all) == 0)
      history_->count("number of unreduced micro-steps");
  }

  /// Orders an operation of Program::norms or Program::updates: compute waits for everything that it accesses.
  [[gnu::noinline]] void order(Operation const& operation) { waits_.order(operation); }
  /// Remembers that such an operation has been enqueued. @param whole  false: an exception has ended it
  [[gnu::noinline]] void remember(Operation const& operation, bool whole = true) {
    if (whole) return waits_.remember(operation);
    waits_.remember_interrupted(operation);
  }
  /// Number of late events since the engine was sealed: see [Note: Events].
  std::size_t late_events() const { return waits_.late_events(); }

 private:
  using Sums = GradientSums<C>;
  using Cells = step::Cells;
  using Pool = step::Pool;

  /// For labels and the trace: a literal.
  static std::string_view pass_name(step::RunPosition const& at) {
    if (at.use == step::RunPosition::no_use) return "optimizer";
    return at.kind == PassKind::forward || at.kind == PassKind::evaluation ? "forward" : "backward";
  }
  Unit& unit_of(Operation const& operation) const { return *units_[operation.unit]; }
  std::byte* slot(Cells cells) const {
    return memory_.slots[static_cast<std::size_t>(cells.pool)][step::Buffers::index(cells)];
  }
  /// The first element of the cells. In a bucket's wire, the own slice starts at offset 0.
  void* address(Operation const& operation, Cells cells) const {
    switch (cells.pool) {
      case Pool::master: return unit_of(operation).gathered;
      case Pool::gradient:
        if (operation.bucket == Operation::none) return unit_of(operation).gradient;
        return memory_.gradients + program_->buckets[operation.bucket].begin;
      case Pool::partial: return unit_of(operation).partial;
      case Pool::accumulator: return unit_of(operation).accumulator;
      case Pool::gather:
      case Pool::gradient_slot:
      case Pool::wire: {
        bool const whole = cells.first % 2 != 0 || cells.count != 1 || operation.bucket != Operation::none;
        if (whole) return slot(cells);
        auto const& unit = unit_of(operation);
        auto const type = cells.pool == Pool::gather          ? unit.types().parameter
                          : cells.pool == Pool::gradient_slot ? unit.types().gradient
                                                              : *program_->wire;
        return slot(cells) + static_cast<std::size_t>(unit.shard().begin) * size_of(type);
      }
      default: return slot(cells);
    }
  }
  /// The reductions for the element type of a unit's buffer.
  Sums const& sums_of(Pool pool, Unit const& unit) const {
    static constexpr Sums fp32 = Sums::template of<float>();
    if (pool == Pool::wire) return rounded_;
    return pool == Pool::gradient_slot && unit.types().gradient != DType::f32 ? written_ : fp32;
  }

  Ticket enqueue(Operation const& operation, step::RunPosition const& at, step::Contents const& contents) {
    using step::Primitive;
    auto const& [from, to, third] = operation.all;
    switch (operation.primitive) {
      case Primitive::open: return open(operation, contents), Ticket{};
      case Primitive::close: return close(operation), Ticket{};
      case Primitive::discard: return {};
      case Primitive::zero:
        device_.zero_async(stream_of(operation), address(operation, from.cells),
                           static_cast<std::size_t>(operation.bytes));
        return {};
      case Primitive::zero_padding: return zero_padding(operation), Ticket{};
      case Primitive::add:
        with_type<Reduce>(unit_of(operation).types().gradient, address(operation, to.cells), [&](auto* sum) {
          kernels::add(device_, stream_of(operation),
                       static_cast<float const*>(address(operation, operation.all[0].cells)), sum, operation.elements);
        });
        return {};
      default: break;
    }
    auto const pass = pass_name(at);
    auto const& span = operation.span;
    if (span.name != Primitive::count_)
      span_ = trace_.begin(stream_of(operation), operation.stream, unit_of(operation).name(), name(span.name), pass,
                           span.bytes);
    auto const ticket = move(operation, pass, contents);
    if (span.ends) span_.end();
    return ticket;
  }
  Ticket move(Operation const& operation, std::string_view pass, step::Contents const& contents) {
    using step::Primitive;
    auto const& from = operation.all[0].cells;
    auto const& to = operation.all[1].cells;
    auto& stream = stream_of(operation);
    auto& unit = unit_of(operation);
    switch (operation.primitive) {
      case Primitive::cast: return cast(unit, operation, address(operation, to)), Ticket{};
      case Primitive::copy:
        device_.copy_async(stream, slot(to), static_cast<std::byte const*>(unit.full) + kept_member_ * operation.bytes,
                           static_cast<std::size_t>(operation.bytes));
        return {};
      case Primitive::hook:
        return unit.hooks.call(&stream, static_cast<float*>(address(operation, from)), unit.shard_numel()), Ticket{};
      case Primitive::round:
        if constexpr (std::is_same_v<Reduce, float>)
          rounded_.round(device_, stream, static_cast<float const*>(address(operation, from)), address(operation, to),
                         operation.elements);
        return {};
      case Primitive::accumulate: {
        bool const completes = to.pool == Pool::gradient || to.pool == Pool::staged_gradient;
        auto const factor = completes ? kernels::mean_factor(unit.placement().world) : 1.0f;
        bool const begins = operation.all[1].mode == step::Mode::write || contents.is_first_term(operation);
        sums_of(from.pool, unit)
            .accumulate(device_, stream, address(operation, from), static_cast<float*>(address(operation, to)),
                        operation.elements, factor, begins);
        return {};
      }
      case Primitive::fetch:
      case Primitive::store:
        device_.copy_async(stream, address(operation, to), address(operation, from),
                           static_cast<std::size_t>(operation.bytes));
        return {};
      default: break;
    }
    auto& group = communicator(operation.group);
    auto const label = history_->label(unit.name(), pass);
    switch (operation.primitive) {
      case Primitive::all_gather:
        return with_type<Param>(unit.types().parameter, slot(to), [&](auto* full) {
          return group.all_gather(stream,
                                  static_cast<std::remove_pointer_t<decltype(full)> const*>(address(operation, from)),
                                  full, static_cast<std::size_t>(operation.elements), label);
        });
      case Primitive::reduce_scatter:
        return sums_of(from.pool, unit).reduce_scatter(group, stream, slot(from), unit.shard(), label);
      case Primitive::all_reduce: {
        auto* const data = address(operation, from);
        if (from.pool != Pool::gradient)
          return sums_of(from.pool, unit).all_reduce(group, stream, data, operation.elements, label);
        auto* const gradients = static_cast<float*>(data);
        return kernels::all_reduce_mean(group, stream, gradients, gradients,
                                        static_cast<std::size_t>(operation.elements), label);
      }
      default: return {};
    }
  }
  Stream& stream_of(Operation const& operation) const { return (*streams_)[operation.stream]; }
  void cast(Unit const& unit, Operation const& operation, void* to) {
    auto& stream = stream_of(operation);
    auto const& types = unit.types();
    if (types.parameter != unit.gathered_type())
      kernels::cast(device_, stream, static_cast<Master const*>(unit.master), static_cast<Param*>(to),
                    operation.elements);
    else if (types.parameter == DType::f32)
      kernels::cast(device_, stream, static_cast<float const*>(unit.gathered), static_cast<float*>(to),
                    operation.elements);
    else
      device_.copy_async(stream, to, unit.gathered, static_cast<std::size_t>(operation.bytes));
  }

  void open(Operation const& operation, step::Contents const& contents) {
    auto const cells = operation.all[0].cells;
    auto& unit = unit_of(operation);
    if (cells.pool == Pool::gather) unit.full = slot(cells);
    if (cells.pool == Pool::gradient_slot) unit.full_gradient = slot(cells);
    if (cells.pool == Pool::gradient) unit.full_gradient = unit.gradient;
    bool const gradients = cells.pool == Pool::gradient_slot || cells.pool == Pool::gradient;
    if (gradients && contents.is_new_sum(operation)) unit.start_gradient_buffer();
    count(operation);
  }
  void close(Operation const& operation) {
    if (operation.all[0].cells.pool == Pool::gather) unit_of(operation).full = nullptr;
    count(operation);
  }
  /// The account follows opens and closes.
  void count(Operation const& operation) {
    auto const change = live_.run(operation);
    if (change == 0) return;
    auto const pool = operation.all[0].cells.pool;
    account_->add_live(pool == Pool::gather || pool == Pool::kept_slice ? MemoryTag::gather : MemoryTag::reduce,
                       change);
  }
  /// No module writes padding, but norms and sums read it.
  void zero_padding(Operation const& operation) {
    auto* const gradients = static_cast<std::byte*>(address(operation, operation.all[0].cells));
    auto const element = static_cast<std::int64_t>(size_of(unit_of(operation).types().gradient));
    for (auto const gap : unit_of(operation).padding())
      device_.zero_async(stream_of(operation), gradients + gap.begin * element,
                         static_cast<std::size_t>(gap.size() * element));
  }

  D device_;
  Streams<D>* streams_;
  MemoryAccount* account_;
  History* history_;
  TraceHook<D> trace_;
  typename TraceHook<D>::Scope span_;           ///< the span in progress
  Sums written_ = Sums::template of<Reduce>();  ///< reductions in the type that backward writes
  Sums rounded_;                                ///< reductions in the type of wires
  Groups<C> groups_;
  Waits<C> waits_;
  Program const* program_ = nullptr;
  SlotMemory memory_;
  FixedArray<Unit*> units_;
  int kept_member_ = 0;
  LiveBytes live_;
  PathList const* paths_ = nullptr;
  std::size_t path_ = 0;                  ///< of the last pass
  std::vector<typename D::Event> begun_;  ///< compute has come to the beginning of each of the latest passes
  std::size_t passes_ = 0;
};

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE::detail
