// SPDX-License-Identifier: Apache-2.0
// A device and a communicator that write down what is enqueued on them, with the bytes that it accesses, and forward
// it.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <typeinfo>
#include <utility>
#include <vector>

#include "fsdp/concepts.hpp"
#include "fsdp/detail/comm/pairwise.hpp"
#include "fsdp/detail/kernels/elementwise.hpp"
#include "fsdp/detail/kernels/norms.hpp"
#include "fsdp/detail/kernels/optimizers.hpp"
#include "fsdp/detail/trace/trace.hpp"
#include "fsdp/error.hpp"
#include "tests/support/devices.hpp"

namespace fsdp::testing {

/// Consecutive bytes of memory that one operation reads or writes. All ranks are threads: addresses name memory of any.
struct Access {
  std::uintptr_t begin, end;
  bool writes;
};

/// The accesses of one operation.
class Accesses {
 public:
  template <class T>
  void read(T const* data, std::int64_t elements) {
    add(data, elements * static_cast<std::int64_t>(sizeof(T)), false);
  }
  template <class T>
  void write(T* data, std::int64_t elements) {
    add(data, elements * static_cast<std::int64_t>(sizeof(T)), true);
  }
  template <class T>
  void read_and_write(T* data, std::int64_t elements) {
    read(data, elements);
    write(data, elements);
  }
  void add(void const* data, std::int64_t bytes, bool writes) {
    auto const begin = reinterpret_cast<std::uintptr_t>(data);
    if (data != nullptr && bytes > 0) list.push_back({begin, begin + static_cast<std::uintptr_t>(bytes), writes});
  }

  std::vector<Access> list;
};

// Accesses of the library's kernels: one overload each, found by the first argument's namespace. A test's kernel has a
// static member `access` instead. A kernel without either does not compile on a recording device.

template <class From, class To>
void accesses_of(Accesses& a, kernels::detail::Cast, From const* in, To* out, std::int64_t n) {
  a.read(in, n);
  a.write(out, n);
}
template <class R>
void accesses_of(Accesses& a, kernels::detail::Accumulate, R const* in, float* out, std::int64_t n, float,
                 bool overwrite) {
  a.read(in, n);
  if (!overwrite) a.read(out, n);
  a.write(out, n);
}
template <class R>
void accesses_of(Accesses& a, kernels::detail::Add, float const* in, R* out, std::int64_t n) {
  a.read(in, n);
  a.read_and_write(out, n);
}
inline void accesses_of(Accesses& a, kernels::detail::Scale, float* x, std::int64_t n, float) {
  a.read_and_write(x, n);
}
template <class T>
void accesses_of(Accesses& a, kernels::detail::Fill, T* out, std::int64_t n, float) {
  a.write(out, n);
}
template <class Values, class T, class... Rest>
void accesses_of(Accesses& a, kernels::detail::FillRandom<Values>, T* out, std::int64_t n, Rest...) {
  a.write(out, n);
}
template <NormKind Kind>
void accesses_of(Accesses& a, kernels::detail::NormPartials<Kind>, float const* x, std::int64_t n, double* out) {
  a.read(x, n);
  a.write(out, kernels::detail::blocks_for(n));
}
template <NormKind Kind>
void accesses_of(Accesses& a, kernels::detail::NormCombine<Kind>, double const* partials, std::int64_t n, double* out) {
  a.read(partials, n);
  a.write(out, 1);
}
inline void accesses_of(Accesses& a, kernels::detail::NormDigits, double const* shares, std::int64_t n, double* out) {
  a.read(shares, n);
  a.write(out, kernels::norm_digit_count);
}
inline void accesses_of(Accesses& a, kernels::detail::ClipFactor, double const* parts, int count, NormKind, float,
                        float const* loss_scale, bool, ClipScalars* out) {
  a.read(parts, count);
  a.read(loss_scale, 1);
  a.write(out, 1);
}
inline void accesses_of(Accesses& a, kernels::detail::BeginStep, OptimizerStep* step, float, float, float,
                        ClipScalars const* clip) {
  a.read_and_write(step, 1);
  a.read(clip, 1);
}
inline void accesses_of(Accesses& a, kernels::detail::CountSkipped, ClipScalars* step) { a.read_and_write(step, 1); }
/// The chunks lie in host memory and are written before the first step.
template <bool Stochastic, class P>
void accesses_of(Accesses& a, kernels::detail::Sgd<Stochastic>, std::int64_t chunk_count, OptimizerChunk const* chunks,
                 OptimizerStep const* step, SgdScalars, P* p, float const* g, float* momentum, std::uint64_t) {
  a.read(step, 1);
  for (std::int64_t i = 0; i < chunk_count; ++i) {
    a.read_and_write(p + chunks[i].begin, chunks[i].count);
    a.read(g + chunks[i].begin, chunks[i].count);
    if (momentum != nullptr) a.read_and_write(momentum + chunks[i].begin + chunks[i].shift, chunks[i].count);
  }
}

inline void accesses_of(Accesses& a, fsdp::detail::Stamp, std::int64_t* out) { a.write(out, 1); }
// Kernels of collectives, which are recorded whole.
template <class T, std::size_t Ranks, class... Rest>
void accesses_of(Accesses&, pairwise::SumFew<T, Ranks>, Rest...) {}
template <class T, class... Rest>
void accesses_of(Accesses&, pairwise::SumMany<T>, Rest...) {}

/// One thing that a rank's host thread has enqueued, or has waited for.
struct Enqueued {
  enum class Kind : unsigned char {
    operation,       ///< a kernel, a copy or a zeroing
    collective,      ///< of one communicator; completes when its own rank is done with it
    record,          ///< of an event
    wait,            ///< of a stream for an event
    wait_for_peers,  ///< of a stream, until all members of a communicator have completed a collective
    await_stream,    ///< of the host
    await_event,     ///< of the host
    exchange,        ///< of the hosts of a communicator's ranks, each with all
  };
  Kind kind{};
  int stream = -1;                 ///< index into Recording::streams; -1: none
  std::string what{};              ///< for messages
  std::vector<Access> accesses{};  ///< of this rank's own memory
  std::vector<Access> input{};     ///< collective: what peers may read of this rank's memory
  int event = -1;
  WaitSite site{};
  std::string communicator{};  ///< equal on its members, and different from all others
  int member = 0, members = 1;
  int root = -1;               ///< the member whose input is read; -1: all members'
  std::uint64_t sequence = 0;  ///< among the communicator's collectives, or among its exchanges
};

/// Enqueued work of one rank, in order. Written by its host thread.
struct Recording {
  std::vector<Enqueued> entries;
  std::vector<std::string> streams;
  std::vector<std::pair<std::uintptr_t, std::size_t>> allocations;  ///< addresses and bytes, in order
  int events = 0;
  bool silent = false;  ///< inside a call of the communicator that is wrapped

  int stream_of(std::string_view name) {
    auto const found = std::find(streams.begin(), streams.end(), name);
    if (found != streams.end()) return static_cast<int>(found - streams.begin());
    streams.emplace_back(name);
    return static_cast<int>(streams.size()) - 1;
  }
  void add(Enqueued entry) {
    if (!silent) entries.push_back(std::move(entry));
  }
};

/// Streams are told apart by their names. Each rank has a device of its own.
template <class D>
struct RecordingDevice : Forward<D> {
  using typename Forward<D>::Stream;
  struct Event {
    typename D::Event base;
    int number;
  };

  explicit RecordingDevice(D device = {}) : Forward<D>{device} {}

  Event make_event() const { return {this->base.make_event(), recording->events++}; }
  void* allocate(std::size_t bytes) const {
    auto* const memory = this->base.allocate(bytes);
    recording->allocations.emplace_back(reinterpret_cast<std::uintptr_t>(memory), bytes);
    return memory;
  }
  void copy_async(Stream& stream, void* to, void const* from, std::size_t bytes) const {
    if (to != from) {
      Accesses accesses;
      accesses.add(from, static_cast<std::int64_t>(bytes), false);
      accesses.add(to, static_cast<std::int64_t>(bytes), true);
      add(Enqueued::Kind::operation, stream, "copy", std::move(accesses));
    }
    this->base.copy_async(stream, to, from, bytes);
  }
  void zero_async(Stream& stream, void* to, std::size_t bytes) const {
    Accesses accesses;
    accesses.add(to, static_cast<std::int64_t>(bytes), true);
    add(Enqueued::Kind::operation, stream, "zero", std::move(accesses));
    this->base.zero_async(stream, to, bytes);
  }
  template <class Kernel, class... Args>
  void launch(Stream& stream, std::int64_t blocks, Kernel kernel, Args... args) const {
    if (!recording->silent) {
      Accesses accesses;
      if constexpr (requires { Kernel::access(accesses, args...); }) {
        Kernel::access(accesses, args...);
      } else if constexpr (requires { accesses_of(accesses, kernel, blocks, args...); }) {
        accesses_of(accesses, kernel, blocks, args...);
      } else {
        accesses_of(accesses, kernel, args...);
      }
      add(Enqueued::Kind::operation, stream, typeid(Kernel).name(), std::move(accesses));
    }
    this->base.launch(stream, blocks, kernel, args...);
  }
  void record(Event& event, Stream& stream) const {
    recording->add({.kind = Enqueued::Kind::record, .stream = number(stream), .event = event.number});
    this->base.record(event.base, stream);
  }
  void wait(Stream& stream, Event const& event, WaitSite site) const {
    recording->add({.kind = Enqueued::Kind::wait, .stream = number(stream), .event = event.number, .site = site});
    this->base.wait(stream, event.base, site);
  }
  void synchronize(Stream& stream) const {
    this->base.synchronize(stream);
    recording->add({.kind = Enqueued::Kind::await_stream, .stream = number(stream)});
  }
  void synchronize(Event const& event) const {
    this->base.synchronize(event.base);
    recording->add({.kind = Enqueued::Kind::await_event, .event = event.number});
  }

  int number(Stream const& stream) const { return recording->stream_of(stream.name()); }

  std::shared_ptr<Recording> recording = std::make_shared<Recording>();

 private:
  void add(Enqueued::Kind kind, Stream const& stream, std::string_view what, Accesses accesses) const {
    recording->add(
        {.kind = kind, .stream = number(stream), .what = std::string(what), .accesses = std::move(accesses.list)});
  }
};

/// Its inner communicator's device is a RecordingDevice, whose recording it shares.
template <class C>
class Recorder {
 public:
  using Device = typename C::Device;
  using Stream = typename Device::Stream;

  explicit Recorder(C inner) : Recorder(std::move(inner), "world") {}

  int rank() const { return inner_.rank(); }
  int size() const { return inner_.size(); }
  Device const& device() const { return inner_.device(); }
  Recorder split(int color, int key, std::string_view name) {
    meet();
    auto inner = silently([&] { return inner_.split(color, key, name); });
    return {std::move(inner), formatted("{}.{} of color {}", name_, splits_++, color)};
  }
  void* allocate(std::size_t bytes) {
    return silently([&] { return inner_.allocate(bytes); });
  }
  void deallocate(void* memory, std::size_t bytes) noexcept { inner_.deallocate(memory, bytes); }
  template <class T>
  Ticket all_gather(Stream& stream, T const* send, T* recv, std::size_t count, Label label) {
    auto const n = static_cast<std::int64_t>(count);
    Accesses own, input;
    own.read(send, n);
    // In place, its own slice is there already.
    bool const in_place = send == recv + n * rank();
    own.write(recv, n * (in_place ? rank() : size()));
    if (in_place) own.write(recv + n * (rank() + 1), n * (size() - rank() - 1));
    input.read(send, n);
    return note(stream, "all_gather", label, own, input,
                [&] { return inner_.all_gather(stream, send, recv, count, label); });
  }
  template <class T>
  Ticket reduce_scatter(Stream& stream, T const* send, T* recv, std::size_t count, Label label) {
    auto const n = static_cast<std::int64_t>(count);
    Accesses own, input;
    own.read(send, n * size());
    own.write(recv, n);
    // Its own slice is nobody's but its own.
    input.read(send, n * rank());
    input.read(send + n * (rank() + 1), n * (size() - rank() - 1));
    return note(stream, "reduce_scatter", label, own, input,
                [&] { return inner_.reduce_scatter(stream, send, recv, count, label); });
  }
  template <class T>
  Ticket all_reduce(Stream& stream, T const* send, T* recv, std::size_t count, Label label) {
    return reduce_all(stream, send, recv, count, label,
                      [&] { return inner_.all_reduce(stream, send, recv, count, label); });
  }
  Ticket all_reduce_mean(Stream& stream, float const* send, float* recv, std::size_t count,
                         Label label) requires TakesMeans<C> {
    return reduce_all(stream, send, recv, count, label,
                      [&] { return inner_.all_reduce_mean(stream, send, recv, count, label); });
  }
  template <class T>
  Ticket broadcast(Stream& stream, T* buffer, std::size_t count, int root, Label label) {
    auto const n = static_cast<std::int64_t>(count);
    Accesses own, input;
    if (rank() == root) {
      own.read(buffer, n);
      input.read(buffer, n);
    } else {
      own.write(buffer, n);
    }
    return note(
        stream, "broadcast", label, own, input, [&] { return inner_.broadcast(stream, buffer, count, root, label); },
        root);
  }
  void wait_for_peers(Stream& stream, Ticket ticket, WaitSite site) {
    if (size() > 1 && ticket.sequence > 0) {
      auto entry = about(Enqueued::Kind::wait_for_peers, ticket.sequence);
      entry.stream = device().number(stream);
      entry.site = site;
      device().recording->add(std::move(entry));
    }
    silently([&] { return inner_.wait_for_peers(stream, ticket, site), 0; });
  }
  std::vector<std::string> exchange(std::string const& mine, std::string_view what) {
    meet();
    return silently([&] { return inner_.exchange(mine, what); });
  }

 private:
  Recorder(C inner, std::string name) : inner_(std::move(inner)), name_(std::move(name)) {}

  template <class Call>
  auto silently(Call const& call) {
    auto const recording = device().recording;
    bool const before = std::exchange(recording->silent, true);
    auto result = call();
    recording->silent = before;
    return result;
  }
  Enqueued about(Enqueued::Kind kind, std::uint64_t sequence) const {
    return {.kind = kind, .communicator = name_, .member = rank(), .members = size(), .sequence = sequence};
  }
  void meet() { device().recording->add(about(Enqueued::Kind::exchange, ++exchanges_)); }
  template <class T, class Call>
  Ticket reduce_all(Stream& stream, T const* send, T* recv, std::size_t count, Label label, Call const& call) {
    auto const n = static_cast<std::int64_t>(count);
    Accesses own, input;
    own.read(send, n);
    own.write(recv, n);
    input.read(recv, n);  // shares of the sum
    if (send != recv) input.read(send, n);
    return note(stream, "all_reduce", label, own, input, call);
  }
  template <class Call>
  Ticket note(Stream& stream, std::string_view what, Label label, Accesses& own, Accesses& input, Call const& call,
              int root = -1) {
    auto const ticket = silently(call);
    auto entry = about(Enqueued::Kind::collective, ticket.sequence);
    entry.root = root;
    entry.stream = device().number(stream);
    entry.what = formatted("{} of {}", what, label.unit);
    entry.accesses = std::move(own.list);
    if (size() > 1) entry.input = std::move(input.list);
    device().recording->add(std::move(entry));
    return ticket;
  }

  C inner_;
  std::string name_;
  int splits_ = 0;
  std::uint64_t exchanges_ = 0;
};

}  // namespace fsdp::testing
