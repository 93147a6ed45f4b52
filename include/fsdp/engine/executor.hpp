// SPDX-License-Identifier: Apache-2.0
// Runs the operations of a program on one rank: orders their accesses, performs each primitive, notes its accesses. The
// program decides everything else.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "fsdp/concepts.hpp"
#include "fsdp/engine/flat_param.hpp"
#include "fsdp/engine/gradient_sums.hpp"
#include "fsdp/engine/history.hpp"
#include "fsdp/engine/streams.hpp"
#include "fsdp/engine/waits.hpp"
#include "fsdp/kernels/elementwise.hpp"
#include "fsdp/kernels/mean.hpp"
#include "fsdp/memory.hpp"
#include "fsdp/step/contents.hpp"
#include "fsdp/step/memory_plan.hpp"
#include "fsdp/step/program.hpp"
#include "fsdp/step/run.hpp"
#include "fsdp/trace/trace.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE::detail {

/// Addresses of the buffers by slot, and of all gradient shards that backward writes.
struct SlotMemory {
  std::array<FixedArray<std::byte*>, step::pools> slots;
  float* gradients = nullptr;  ///< in the order of Program::gradient_order
};

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

  /// @param wire  the type that fp32 gradients are rounded to for the sum over ranks; not set: none
  /// @throws ConfigError if the communicator does not sum this type
  [[gnu::cold]] Executor(D const& device, int rank, Streams<D>& streams, MemoryAccount& account, History const& history,
                         std::optional<DType> wire)
      : device_(device),
        streams_(&streams),
        account_(&account),
        history_(&history),
        rounded_(wire ? Sums::narrow(*wire, rank) : Sums{}),
        waits_(device, streams, groups_) {}

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

  /// Units and buffers are placed. Zeroes all slots of gradients.
  /// @param program  must outlive the executor, as `units` must
  /// @param member   this rank's place among those that gather kept slices
  template <class Units>
  [[gnu::cold]] void prepare(Program const& program, Units const& units, SlotMemory memory, int member) {
    program_ = &program;
    memory_ = std::move(memory);
    kept_member_ = member;
    contents_ = step::Contents(program);
    live_ = LiveBytes(program);
    waits_.prepare(program);
    units_ = FixedArray<Unit*>(units.size());
    for (std::size_t u = 0; u < units.size(); ++u) {
      units_[u] = units[u].get();
      if (program.units[u].reads_masters) units_[u]->full = units_[u]->gathered;
    }
    for (std::uint32_t slot = 0; slot < program.gradient_slots.size(); ++slot)
      run(step::zeroing(program, slot, StreamKind::reduce), "forward");
  }

  /// Undoes prepare() and set_communicator(): sealing has failed. @pre all streams have run dry
  [[gnu::cold]] void release() noexcept {
    contents_ = {}, live_ = {}, units_ = {}, memory_ = {};
    for (auto& group : groups_) group.reset();
  }

  /// A pass begins.
  void begin_pass(Facts flags) { waits_.set_flags(flags); }
  /// Runs an operation, if contents let it. @param pass  for labels and the trace: a literal
  /// @note Stream: the operation's stream waits for what its accesses need
  /// @note Collective: those of the operation
  void run(Operation const& operation, std::string_view pass) {
    if (!contents_.runs(operation)) return;
    waits_.order(operation);
    Ticket ticket;
    try {
      ticket = perform(operation, pass);
    } catch (...) {
      waits_.note_interrupted(operation);
      span_ = {};
      throw;
    }
    waits_.note(operation, ticket);
    contents_.apply(operation);
  }

  /// Begins a module's computation: call it before the module enqueues its kernels on compute.
  /// @note Stream: compute waits for the parameters and gradients that they access
  void begin_compute(Program::Turn const& turn) {
    waits_.order(turn.compute);
    for (auto const& operation : turn.beside) waits_.order(operation);
    computing_ = &turn;
  }
  /// Ends a module's computation: call it after the kernels are enqueued.
  void end_compute() {
    auto const& turn = *std::exchange(computing_, nullptr);
    waits_.note(turn.compute);
    contents_.apply(turn.compute);
    for (auto const& operation : turn.beside) {
      waits_.note(operation);
      contents_.apply(operation);
    }
  }
  /// Drops all parameters: a pass is forgotten. Kernels that were enqueued for a use go on.
  [[gnu::noinline]] void drop_parameters() {
    if (auto const* const turn = std::exchange(computing_, nullptr)) {
      waits_.note_interrupted(turn->compute);
      for (auto const& operation : turn->beside) waits_.note_interrupted(operation);
    }
    contents_.drop_parameters([this](Operation const& operation) { run(operation, "forward"); });
  }
  /// Forgets all gradients. @note Stream: slots that must hold zeroes are zeroed on compute.
  void discard_gradients() {
    contents_.discard_gradients([this](Operation const& operation) { run(operation, "backward"); });
  }

  /// Orders an operation of Program::norms or Program::updates: compute waits for everything that it accesses.
  [[gnu::noinline]] void order(Operation const& operation) { waits_.order(operation); }
  /// Notes that such an operation has been enqueued. @param whole  false: an exception has ended it
  [[gnu::noinline]] void note(Operation const& operation, bool whole = true) {
    if (whole) return waits_.note(operation);
    waits_.note_interrupted(operation);
  }
  /// Applies an update: call it when the update has used the unit's gradients.
  void apply(Operation const& operation) { contents_.apply(operation); }

  step::Contents const& contents() const { return contents_; }
  /// Number of late events since the engine was sealed: see [Note: Events].
  std::size_t late_records() const { return waits_.late_records(); }

 private:
  using Sums = GradientSums<C>;
  using Cells = step::Cells;
  using Pool = step::Pool;

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

  Ticket perform(Operation const& operation, std::string_view pass) {
    using step::Primitive;
    auto const& [from, to, third] = operation.all;
    switch (operation.primitive) {
      case Primitive::open: return open(operation), Ticket{};
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
    auto const& span = operation.span;
    if (span.name != Primitive::count_)
      span_ = trace_.begin(stream_of(operation), operation.stream, unit_of(operation).name(), name(span.name), pass,
                           span.bytes);
    auto const ticket = move(operation, pass);
    if (span.ends) span_.end();
    return ticket;
  }
  Ticket move(Operation const& operation, std::string_view pass) {
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
        bool const begins = operation.all[1].mode == step::Mode::write || contents_.begins_sum(operation);
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

  void open(Operation const& operation) {
    auto const cells = operation.all[0].cells;
    auto& unit = unit_of(operation);
    if (cells.pool == Pool::gather) unit.full = slot(cells);
    if (cells.pool == Pool::gradient_slot) unit.full_gradient = slot(cells);
    if (cells.pool == Pool::gradient) unit.full_gradient = unit.gradient;
    bool const gradients = cells.pool == Pool::gradient_slot || cells.pool == Pool::gradient;
    if (gradients && contents_.is_fresh(operation)) unit.begin_gradients();
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
    account_->lease(pool == Pool::gather || pool == Pool::kept ? MemoryTag::gather : MemoryTag::reduce, change);
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
  History const* history_;
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
  step::Contents contents_;
  LiveBytes live_;
  Program::Turn const* computing_ = nullptr;  ///< of the open use
};

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE::detail
