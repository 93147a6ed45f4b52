// SPDX-License-Identifier: Apache-2.0
// The four concepts of the library: Device, Communicator, Strategy, Module.
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "fsdp/detail/base/streams.hpp"
#include "fsdp/tensor.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE {

// clang-format 14 breaks compound requirements apart.
// clang-format off

/// Communication streams ask for high priority, so that a collective is not queued behind compute.
enum class StreamPriority : unsigned char { normal, high };

namespace detail {
/// The smallest kernel: what Device::launch must accept. Kernels are stateless functors, called once per block.
struct ProbeKernel {
  template <class Block>
  FSDP_HD void operator()(Block const&, std::int64_t, float) const {}
};
}  // namespace detail

/// A device: owner of memory and streams. A model is a cheap, copyable handle.
///
/// Stream and Event are move-only owners with CUDA's semantics: a stream runs in order; streams are unordered except
/// through events; `record` may be called again on the same event, and `wait` refers to the latest `record` before it
/// in host order. Waiting on an event that was never recorded is an error where the device can tell.
/// Only `synchronize` and `deallocate` may block the calling thread; synchronize with an event waits for its latest
/// record, and not while the stream is captured into a graph.
template <class D>
concept Device = std::copyable<D> && std::movable<typename D::Stream> && std::movable<typename D::Event> &&
                 requires(D const device, typename D::Stream& stream, typename D::Event& event, void* to, void const* from,
                          std::size_t bytes, std::string_view label) {
                   { D::name } -> std::convertible_to<std::string_view>;
                   { device.make_stream(label, StreamPriority::high) } -> std::same_as<typename D::Stream>;
                   { device.make_event() } -> std::same_as<typename D::Event>;
                   { device.allocate(bytes) } -> std::same_as<void*>;  // aligned to 256 bytes; nullptr for 0; throws ResourceError
                   { device.deallocate(to, bytes) } noexcept;
                   { device.copy_async(stream, to, from, bytes) };     // host or device memory on either side
                   { device.zero_async(stream, to, bytes) };
                   { device.record(event, stream) };
                   { device.wait(stream, std::as_const(event), WaitSite::none) };
                   { device.synchronize(stream) };                     // rethrows what the stream's work threw
                   { device.synchronize(std::as_const(event)) };
                   { device.launch(stream, std::int64_t{}, detail::ProbeKernel{}, 0.0f) };  // kernel(block, index, args...)
                 };

/// Names a collective for the order check, the trace and error messages. The texts must outlive the call's execution.
struct Label {
  std::string_view unit;  ///< the unit whose data move
  std::string_view pass;  ///< "forward", "backward", "optimizer", ...
  std::string_view history{};  ///< a text that must be equal on all ranks, such as their latest steps; copied if kept
};

/// Identifies one enqueued collective of a communicator, for `wait_for_peers`.
struct Ticket {
  std::uint64_t sequence = 0;  ///< 1 for the communicator's first collective; 0: nothing to wait for
};

/// A group of ranks that run collectives, each enqueued on a stream of `Device`.
///
/// All ranks enqueue the same collectives in the same order, from one host thread per rank, on one stream per
/// communicator (a second stream is a UsageError). The order is one over all communicators of one world that two ranks
/// both belong to: models may report ranks that differ in it, even where no wait would come of it. Enqueueing never
/// waits for device work. Reductions are sums, in the fixed pairwise tree of docs/numerics.md where the model can
/// promise it. In place: all_gather with `send == recv + rank * count`; reduce_scatter with `recv == send + rank *
/// count`; all_reduce with `send == recv`. Otherwise `send` and `recv` are apart. An all_reduce is in place on all
/// ranks or on none: a model may refuse others.
/// The concept asks for collectives of fp32, and for an all_reduce of fp64 in place; engines need them in the types of
/// their precision, and for EngineOptions::reduce_dtype reductions in bf16 or fp16.
/// A rank's input may still be read by peers after its own collective has completed: before it is overwritten, the
/// stream that overwrites it calls `wait_for_peers` with the collective's ticket. It need not for the input of an
/// earlier collective: when an all_gather, reduce_scatter or all_reduce completes on a rank, all peers have ended the
/// collectives before it (a broadcast says nothing of the kind). A model that does not promise this has a member
/// `static constexpr bool completes_in_order = false`, or a function of this name that says so at run time.
///
/// split, allocate and exchange are the control plane: they block, and say what they are for (the new communicator's
/// name, what the texts are), so that ranks which call different ones all get an OrderError that names both. A model
/// may have `ask_first_rank(text, what, answer)` too, in which rank 0 answers for all: see comm::ask_first_rank.
template <class C>
concept Communicator =
    std::movable<C> && Device<typename C::Device> &&
    requires(C& comm, C const& view, typename C::Device::Stream& stream, float const* send, float* recv, double* sums,
             std::size_t count, void* memory, Label label, Ticket ticket, std::string_view text) {
      { view.rank() } -> std::same_as<int>;
      { view.size() } -> std::same_as<int>;
      { view.device() } -> std::convertible_to<typename C::Device const&>;
      { comm.split(int{}, int{}, text) } -> std::same_as<C>;    // (color, key, name of the new one); collective over this communicator
      { comm.allocate(count) } -> std::same_as<void*>;          // collective; bytes; usable by every communicator split from this one
      { comm.deallocate(memory, count) } noexcept;              // not collective
      { comm.all_gather(stream, send, recv, count, label) } -> std::same_as<Ticket>;      // count: elements per rank
      { comm.reduce_scatter(stream, send, recv, count, label) } -> std::same_as<Ticket>;  // count: elements per rank
      { comm.all_reduce(stream, send, recv, count, label) } -> std::same_as<Ticket>;
      { comm.all_reduce(stream, sums, sums, count, label) } -> std::same_as<Ticket>;
      { comm.broadcast(stream, recv, count, int{}, label) } -> std::same_as<Ticket>;      // in place, from root
      { comm.wait_for_peers(stream, ticket, WaitSite::none) };  // any stream of the device
      { comm.exchange(std::string{}, text) } -> std::same_as<std::vector<std::string>>;  // (text, what it is): all-gathers; blocks
    };

namespace detail {

/// The communicator's reductions take elements of type T, as Communicator says of float.
template <class C, class T>
concept Sums = requires(C& comm, typename C::Device::Stream& stream, T const* send, T* recv, std::size_t count,
                        Label label) {
  { comm.reduce_scatter(stream, send, recv, count, label) } -> std::same_as<Ticket>;
  { comm.all_reduce(stream, send, recv, count, label) } -> std::same_as<Ticket>;
};

}  // namespace detail

/// Whether a communicator's reduce_scatter and all_reduce take elements of type T. One that has both for all types may
/// say by a member `sums(DType)` which of them it takes.
template <class T, class C>
constexpr bool takes_sums(C const& comm) {
  if constexpr (!detail::Sums<C, T>)
    return false;
  else if constexpr (requires { comm.sums(dtype_of<T>); })
    return comm.sums(dtype_of<T>);
  else
    return true;
}

/// Whether a collective that completes says that peers have ended the ones before it: see Communicator.
template <class C>
constexpr bool order_among_peers(C const& comm) {
  if constexpr (requires { comm.completes_in_order(); })
    return comm.completes_in_order();
  else if constexpr (requires { C::completes_in_order; })
    return C::completes_in_order;
  else
    return true;
}

/// A communicator that must be told in advance which memory its collectives move. An engine allocates on the world, and
/// registers each allocation with every communicator that moves some of it; those end before the memory is returned.
template <class C>
concept RegistersMemory = Communicator<C> && requires(C& comm, void* memory, std::size_t bytes) {
  { comm.register_memory(memory, bytes) };                  // what allocate(bytes) gave, here or on what this was split from; collective
};

/// Whether the ranks of a communicator meet to register memory. AnyCommunicator takes the call for all, and says
/// whether the communicator that it holds does.
template <class C>
constexpr bool registers_memory(C const& comm) {
  if constexpr (requires { comm.registers_memory(); })
    return comm.registers_memory();
  else
    return RegistersMemory<C>;
}

/// A communicator that takes the mean over ranks itself, in the passes over memory that the sum takes: what all_reduce
/// gives, times 1.0f / size(), rounded once more. Of others, engines multiply the sum in a pass of its own; the bits
/// are the same.
template <class C>
concept TakesMeans = Communicator<C> && requires(C& comm, typename C::Device::Stream& stream, float const* send, float* recv,
                                                 std::size_t count, Label label) {
  { comm.all_reduce_mean(stream, send, recv, count, label) } -> std::same_as<Ticket>;
};

/// Whether a communicator that TakesMeans does so for what it holds: AnyCommunicator may hold one that does not.
template <class C>
constexpr bool takes_means(C const& comm) {
  if constexpr (requires { comm.takes_means(); })
    return comm.takes_means();
  else
    return TakesMeans<C>;
}

/// A communicator that takes what an engine did last, when the engine ends, and compares it over its ranks at the end
/// of the run. Not collective, and does not throw.
template <class C>
concept ReportsHistory = requires(C& comm, int engine, std::string_view history) {
  { comm.report_history(engine, history) } noexcept;        // engine: its number in its mesh, equal on all ranks
};

/// The former name of ReportsHistory, for one version, in which the member may have its former name, too.
template <class C>
concept KeepsEnds = ReportsHistory<C> || requires(C& comm, int engine, std::string_view history) {
  { comm.keep_end(engine, history) } noexcept;
};

/// Divides a unit's parameters, gradients and optimizer state over ranks (see strategy.hpp). Engine and Engine::shard
/// take one. A strategy that has a member `group` as well (int) shards within groups of so many consecutive ranks, and
/// replicates over the groups. Every rank of a group keeps an equal shard. A strategy does not see where in the model
/// its unit is: EngineOptions::keep_last and keep_root decide by place.
template <class S>
concept Strategy = requires(S const& strategy) {
  { S::name } -> std::convertible_to<std::string_view>;                // for messages, and compared over ranks; not a temporary
  { strategy.shards } -> std::convertible_to<bool>;                    // false: every rank keeps everything
  { strategy.reshards_after_forward } -> std::convertible_to<bool>;    // false: unsharded from forward until after backward
};

namespace detail {
/// Stands in for the visitor that `describe` gets.
struct ProbeVisitor {
  template <class T, std::size_t Rank, class... Options>
  void operator()(std::string_view, Tensor<T, Rank>&, Extents<Rank>, Options const&...) const {}
};
struct Unrelated {};

/// `describe` takes its Params by value: it would take a temporary one, and nothing else.
template <class M>
concept DescribesCopies = requires(M const& module, typename M::template Params<float> temporary, ProbeVisitor visit) {
  { module.describe(static_cast<typename M::template Params<float>&&>(temporary), visit) };
} && !requires(M const& module, Unrelated other, ProbeVisitor visit) {
  { module.describe(other, visit) };
};
}  // namespace detail

/// A user's type that computes. It names its tensors once, in `describe`; what its `forward` and `backward` take and
/// return is its own affair (ShardedModule passes them through).
///
/// [Note: Who begins a gradient's sum] By itself, `backward` gets Params<Reduce> and adds to them: the engine has
/// zeroed them before the first addition. A module with `static constexpr bool sets_gradients = true` gets
/// Params<Gradient<Reduce>>, and promises to store every element of a gradient that is `fresh`, a product with beta =
/// 0, and to add to the others. If all modules of all units that take buffers in turn promise it, nothing is zeroed but
/// padding.
template <class M>
concept Module = requires(M const& module, typename M::template Params<float>& gradients,
                          typename M::template Params<float const>& weights, detail::ProbeVisitor visit) {
  { module.describe(gradients, visit) };
  { module.describe(weights, visit) };
} && !detail::DescribesCopies<M>;

/// A module that begins gradient sums itself.
template <class M>
concept SetsGradients = Module<M> && requires(M const& module) {
  { module.sets_gradients } -> std::convertible_to<bool>;
  typename M::template Params<Gradient<float>>;
};

/// A module that may be told that a gradient is not wanted: with `static constexpr bool skips_gradients = true`,
/// `backward` gets a tensor without data (`g.weight.wanted()` is false) for the gradient of a frozen tensor, and in a
/// pass of Engine::frozen_parameters for all, and must not write it. Other modules write these gradients into a buffer
/// that nothing reads.
template <class M>
concept SkipsGradients = Module<M> && requires(M const& module) {
  { module.skips_gradients } -> std::convertible_to<bool>;
};

// clang-format on

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE
