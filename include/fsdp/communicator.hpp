// SPDX-License-Identifier: Apache-2.0
// A mesh: the ranks of a run, with their communicator. Exchanges of texts over any communicator: ranks send them to
// rank 0, which answers all. The concept of communicators is in concepts.hpp.
#pragma once

#include <array>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "fsdp/concepts.hpp"
#include "fsdp/error.hpp"
#include "fsdp/tensor.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE::comm {

/// Gathers a text of every rank on rank 0, and broadcasts its answer. Rank 0 receives every text once, and sends the
/// answer once to each rank, so its traffic grows linearly with the number of ranks; `exchange` sends every text to
/// every rank.
/// @param world   a communicator. Without an `ask_first_rank` of its own, texts are exchanged and every rank computes
///                the answer
/// @param what    the texts are, in a word or two: equal on all ranks
/// @param answer  called with the texts in the order of ranks; returns a std::string. It depends on nothing else, and
///                throws nothing: rank 0 may call it for all
/// @return the answer, on every rank
/// @throws OrderError on every rank if their `what` differ
/// @note Collective: yes; blocks.
template <class C, class Answer>
std::string ask_first_rank(C& world, std::string const& mine, std::string_view what, Answer const& answer) {
  if constexpr (requires { world.ask_first_rank(mine, what, answer); })
    return world.ask_first_rank(mine, what, answer);
  else if constexpr (requires { world.consult(mine, what, answer); })  // its former name
    return world.consult(mine, what, answer);
  else
    return answer(world.exchange(mine, what));
}
/// Former name of ask_first_rank.
template <class C, class Answer>
[[deprecated("write ask_first_rank")]] std::string consult(C& world, std::string const& mine, std::string_view what,
                                                           Answer const& answer) {
  return ask_first_rank(world, mine, what, answer);
}

/// Leaves why a rank has failed to its world, which reports it when the run ends; prints it on stderr if the world
/// cannot do that.
template <class C>
void defer_failure(C& world, Failure const& why) noexcept {
  if constexpr (requires { world.defer_failure(why); })
    world.defer_failure(why);
  else if constexpr (requires { world.leave_failure(why); })  // its former name
    world.leave_failure(why);
  else
    std::fprintf(stderr, "fsdp: rank %d: %s\n", world.rank(), why.text.c_str());
}

/// Hands what an engine did last to its world, if that compares it over ranks at the end of the run: see
/// ReportsHistory.
template <class C>
void report_history(C& world, int engine, std::string_view history) noexcept {
  if constexpr (ReportsHistory<C>)
    world.report_history(engine, history);
  else if constexpr (KeepsEnds<C>)
    world.keep_end(engine, history);
}

/// Answers with rank 0's text, or with "" if there is none.
inline std::string text_of_first(std::vector<std::string> const& texts) {
  return texts.empty() ? std::string() : texts.front();
}
/// Answers with the text of the lowest rank that has one.
inline std::string first_text(std::vector<std::string> const& texts) {
  for (auto const& text : texts)
    if (!text.empty()) return text;
  return {};
}
/// Answers with "". The call shows that all ranks have come.
inline std::string no_text(std::vector<std::string> const& /*texts*/) { return {}; }

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE::comm

namespace fsdp::inline FSDP_VERSION_NAMESPACE {

/// A communicator whose kind is chosen at run time: threads, MPI or NCCL, or one of your own. Engines over it are
/// compiled once for all kinds of one device.
///
/// AnyCommunicator models Communicator, and hands every call on. The contracts (who may read what when, what blocks,
/// what is collective, what is thrown) are those of the communicator that it holds. All optional members are there: it
/// says at run time which ones its communicator has (registers_memory, takes_means, completes_in_order, sums).
/// @throws UsageError from every call on an object that was moved from, except those that are noexcept
template <Device D>
class AnyCommunicator {
 public:
  using Device = D;                   ///< device of the communicators that it may hold
  using Stream = typename D::Stream;  ///< stream of the device

  AnyCommunicator() = delete;
  AnyCommunicator(AnyCommunicator&&) noexcept = default;             ///< takes the communicator out of the other object
  AnyCommunicator& operator=(AnyCommunicator&&) noexcept = default;  ///< ends its communicator; takes the other's
  AnyCommunicator(AnyCommunicator const&) = delete;
  AnyCommunicator& operator=(AnyCommunicator const&) = delete;
  ~AnyCommunicator() = default;
  /// Takes over `communicator`. Whether a type is a communicator may depend on what it can be made from, so the body
  /// asks for that.
  template <class C>
  requires(!std::same_as<C, AnyCommunicator> && std::same_as<typename C::Device, D>)
      AnyCommunicator(C communicator)  // NOLINT(google-explicit-constructor): any communicator is one
      : held_(std::make_unique<Holder<C>>(std::move(communicator))) {
    static_assert(Communicator<C>, "AnyCommunicator holds models of fsdp::Communicator, and this type is none");
  }

  int rank() const { return held().rank; }                ///< this rank, in [0, size())
  int size() const { return held().size; }                ///< number of ranks
  Device const& device() const { return held().device; }  ///< device whose memory is moved
  /// A communicator of the ranks of equal `color`, ordered by `key`. @note Collective: yes; blocks.
  AnyCommunicator split(int color, int key, std::string_view name) {
    return AnyCommunicator(held().split(color, key, name));
  }
  void* allocate(std::size_t bytes) { return held().allocate(bytes); }  ///< memory for collectives; all ranks call it
  /// Returns memory of allocate(bytes). @note Collective: no. May block.
  void deallocate(void* memory, std::size_t bytes) noexcept {
    if (held_ != nullptr) held_->deallocate(memory, bytes);
  }
  /// Registers memory of allocate(bytes) for collectives, if registers_memory(): then collective. Else nothing.
  void register_memory(void* memory, std::size_t bytes) { held().register_memory(memory, bytes); }

  /// Gathers `count` elements of every rank, in rank order, into `recv` (size() * count). @note Collective: yes.
  template <class T>
  Ticket all_gather(Stream& stream, T const* send, T* recv, std::size_t count, Label label) {
    return held().collective(stream, {Transfer::Kind::all_gather, dtype_of<T>, send, recv, count}, label);
  }
  /// Sums `send` (size() * count) over ranks; `recv` (count) gets slice rank() of the sum. @note Collective: yes.
  template <class T>
  Ticket reduce_scatter(Stream& stream, T const* send, T* recv, std::size_t count, Label label) {
    return held().collective(stream, {Transfer::Kind::reduce_scatter, dtype_of<T>, send, recv, count}, label);
  }
  /// Sums `count` elements over ranks; every rank gets the sum. @note Collective: yes.
  template <class T>
  Ticket all_reduce(Stream& stream, T const* send, T* recv, std::size_t count, Label label) {
    return held().collective(stream, {Transfer::Kind::all_reduce, dtype_of<T>, send, recv, count}, label);
  }
  /// The mean of `count` elements over ranks. @throws UsageError if the held communicator has none. @note Collective: yes.
  Ticket all_reduce_mean(Stream& stream, float const* send, float* recv, std::size_t count, Label label) {
    return held().collective(stream, {Transfer::Kind::all_reduce_mean, DType::f32, send, recv, count}, label);
  }
  /// Copies `count` elements of rank `root` to all ranks, in place. @note Collective: yes.
  template <class T>
  Ticket broadcast(Stream& stream, T* data, std::size_t count, int root, Label label) {
    return held().collective(stream, {Transfer::Kind::broadcast, dtype_of<T>, data, data, count, root}, label);
  }
  /// Makes `stream` wait until no peer reads this rank's input of the collective `ticket` any more.
  void wait_for_peers(Stream& stream, Ticket ticket, WaitSite site) { held().wait_for_peers(stream, ticket, site); }

  /// Texts of all ranks, in order. @param what  names the exchange; equal on all ranks. @note Collective: yes; blocks.
  std::vector<std::string> exchange(std::string const& text, std::string_view what) {
    return held().exchange(text, what);
  }
  /// Gathers texts on rank 0, and returns its answer on all ranks: see comm::ask_first_rank.
  template <class Answer>
  std::string ask_first_rank(std::string const& text, std::string_view what, Answer const& answer) {
    auto const call = [&](std::vector<std::string> const& texts) { return answer(texts); };
    return held().ask_first_rank(text, what, {&call, [](void const* of, std::vector<std::string> const& texts) {
                                                return (*static_cast<decltype(call) const*>(of))(texts);
                                              }});
  }
  /// Tells peers that wait for this rank why it has failed, if the communicator can do that.
  void note_failure(Failure const& why) noexcept {
    if (held_ != nullptr) held_->note_failure(why);
  }
  /// Leaves a failure to the communicator, which reports it when the run ends: see comm::defer_failure.
  void defer_failure(Failure const& why) noexcept {
    if (held_ != nullptr) held_->defer_failure(why);
  }
  /// Hands over what an engine did last, to be compared over ranks when the run ends: see ReportsHistory.
  void report_history(int engine, std::string_view history) noexcept {
    if (held_ != nullptr) held_->report_history(engine, history);
  }

  bool registers_memory() const { return held().traits.registers_memory; }  ///< whether registering memory is collective
  bool takes_means() const { return held().traits.takes_means; }            ///< whether the held communicator takes means
  /// Whether, when a collective completes, peers have ended those before it: see Communicator.
  bool completes_in_order() const { return held().traits.completes_in_order; }
  /// Whether reduce_scatter and all_reduce take elements of this type.
  bool sums(DType type) const { return (held().traits.sums >> static_cast<unsigned>(type) & 1u) != 0; }

 private:
  /// A collective.
  struct Transfer {
    enum class Kind : std::uint8_t { all_gather, reduce_scatter, all_reduce, all_reduce_mean, broadcast };
    Kind kind{};
    DType type{};
    void const* send = nullptr;
    void* recv = nullptr;
    std::size_t count = 0;  ///< elements, as the caller gives them
    int root = 0;           ///< of a broadcast
  };
  struct Traits {
    bool registers_memory, takes_means, completes_in_order;
    std::uint8_t sums;  ///< a bit for each DType
  };
  /// A function of the caller's, which outlives the call.
  struct Answerer {
    void const* answer;
    std::string (*call)(void const*, std::vector<std::string> const&);
    std::string operator()(std::vector<std::string> const& texts) const { return call(answer, texts); }
  };
  struct Held {
    Held(int own_rank, int ranks, D on, Traits of) : rank(own_rank), size(ranks), device(std::move(on)), traits(of) {}
    Held(Held const&) = delete;
    Held& operator=(Held const&) = delete;
    virtual ~Held() = default;
    virtual std::unique_ptr<Held> split(int color, int key, std::string_view name) = 0;
    virtual void* allocate(std::size_t bytes) = 0;
    virtual void deallocate(void* memory, std::size_t bytes) noexcept = 0;
    virtual void register_memory(void* memory, std::size_t bytes) = 0;
    virtual Ticket collective(Stream& stream, Transfer const& transfer, Label label) = 0;
    virtual void wait_for_peers(Stream& stream, Ticket ticket, WaitSite site) = 0;
    virtual std::vector<std::string> exchange(std::string const& text, std::string_view what) = 0;
    virtual std::string ask_first_rank(std::string const& text, std::string_view what, Answerer answer) = 0;
    virtual void note_failure(Failure const& why) noexcept = 0;
    virtual void defer_failure(Failure const& why) noexcept = 0;
    virtual void report_history(int engine, std::string_view history) noexcept = 0;

    int const rank, size;
    D const device;
    Traits const traits;
  };

  template <class C>
  static constexpr Traits traits_of(C const& comm) {
    auto const bit = [](bool takes, DType type) { return takes ? 1u << static_cast<unsigned>(type) : 0u; };
    unsigned const sums = bit(takes_sums<float>(comm), DType::f32) | bit(takes_sums<double>(comm), DType::f64) |
                          bit(takes_sums<bf16>(comm), DType::bf16) | bit(takes_sums<fp16>(comm), DType::f16) |
                          bit(takes_sums<std::int64_t>(comm), DType::i64);
    return {fsdp::registers_memory(comm), fsdp::takes_means(comm), order_among_peers(comm),
            static_cast<std::uint8_t>(sums)};
  }

  template <class C>
  struct Holder final : Held {
    explicit Holder(C communicator)
        : Held(communicator.rank(), communicator.size(), communicator.device(), traits_of(communicator)),
          comm(std::move(communicator)) {}
    std::unique_ptr<Held> split(int color, int key, std::string_view name) override {
      return std::make_unique<Holder>(comm.split(color, key, name));
    }
    void* allocate(std::size_t bytes) override { return comm.allocate(bytes); }
    void deallocate(void* memory, std::size_t bytes) noexcept override { comm.deallocate(memory, bytes); }
    void register_memory([[maybe_unused]] void* memory, [[maybe_unused]] std::size_t bytes) override {
      if constexpr (RegistersMemory<C>) comm.register_memory(memory, bytes);
    }
    Ticket collective(Stream& stream, Transfer const& transfer, Label label) override {
      switch (transfer.type) {
        case DType::f32: return collective_of<float>(stream, transfer, label);
        case DType::f64: return collective_of<double>(stream, transfer, label);
        case DType::bf16: return collective_of<bf16>(stream, transfer, label);
        case DType::f16: return collective_of<fp16>(stream, transfer, label);
        case DType::i64: return collective_of<std::int64_t>(stream, transfer, label);
      }
      refuse(transfer, label);  // no type
    }
    void wait_for_peers(Stream& stream, Ticket ticket, WaitSite site) override {
      comm.wait_for_peers(stream, ticket, site);
    }
    std::vector<std::string> exchange(std::string const& text, std::string_view what) override {
      return comm.exchange(text, what);
    }
    std::string ask_first_rank(std::string const& text, std::string_view what, Answerer answer) override {
      return comm::ask_first_rank(comm, text, what, answer);
    }
    void note_failure([[maybe_unused]] Failure const& why) noexcept override {
      if constexpr (requires { comm.note_failure(why); }) comm.note_failure(why);
    }
    void defer_failure(Failure const& why) noexcept override { comm::defer_failure(comm, why); }
    void report_history(int engine, std::string_view history) noexcept override {
      comm::report_history(comm, engine, history);
    }

   private:
    template <class T>
    Ticket collective_of(Stream& stream, Transfer const& t, Label label) {
      auto const* const send = static_cast<T const*>(t.send);
      auto* const recv = static_cast<T*>(t.recv);
      switch (t.kind) {
        case Transfer::Kind::all_gather:
          if constexpr (requires { comm.all_gather(stream, send, recv, t.count, label); })
            return comm.all_gather(stream, send, recv, t.count, label);
          break;
        case Transfer::Kind::reduce_scatter:
          if constexpr (requires { comm.reduce_scatter(stream, send, recv, t.count, label); })
            return comm.reduce_scatter(stream, send, recv, t.count, label);
          break;
        case Transfer::Kind::all_reduce:
          if constexpr (requires { comm.all_reduce(stream, send, recv, t.count, label); })
            return comm.all_reduce(stream, send, recv, t.count, label);
          break;
        case Transfer::Kind::all_reduce_mean:
          if constexpr (requires { comm.all_reduce_mean(stream, send, recv, t.count, label); })
            return comm.all_reduce_mean(stream, send, recv, t.count, label);
          break;
        case Transfer::Kind::broadcast:
          if constexpr (requires { comm.broadcast(stream, recv, t.count, t.root, label); })
            return comm.broadcast(stream, recv, t.count, t.root, label);
          break;
      }
      refuse(t, label);
    }
    [[noreturn, gnu::cold]] void refuse(Transfer const& t, Label label) const {
      auto const whose = label.unit.empty() ? std::string() : formatted(" for unit '{}' ({})", label.unit, label.pass);
      fail<UsageError>("rank {}: the communicator that AnyCommunicator holds has no {} of {}{}", this->rank,
                       name(t.kind), fsdp::name(t.type), whose);
    }

    C comm;
  };

  static constexpr std::string_view name(typename Transfer::Kind kind) {
    constexpr std::array<std::string_view, 5> names{"all_gather", "reduce_scatter", "all_reduce", "all_reduce_mean",
                                                    "broadcast"};
    return names[static_cast<std::size_t>(kind)];
  }

  explicit AnyCommunicator(std::unique_ptr<Held> held) : held_(std::move(held)) {}
  Held& held() const {
    FSDP_EXPECTS(held_ != nullptr, "this AnyCommunicator was moved from; call the object to which it was moved");
    return *held_;
  }

  std::unique_ptr<Held> held_;
};
template <Communicator C>
AnyCommunicator(C) -> AnyCommunicator<typename C::Device>;

/// The world of ranks, which engines divide by their strategies. Must outlive them.
template <Communicator C>
class Mesh {
 public:
  using Comm = C;  ///< communicator of all ranks

  /// @throws UsageError if the world is an AnyCommunicator that was moved from
  explicit Mesh(C world) : world_(std::move(world)) {
    static_cast<void>(world_.rank());  // throws if it was moved from
  }

  C& world() { return world_; }               ///< communicator of all ranks; lives as long as the mesh
  int rank() const { return world_.rank(); }  ///< this rank, in [0, size())
  int size() const { return world_.size(); }  ///< number of ranks
  typename C::Device const& device() const { return world_.device(); }  ///< device of the communicator

  /// Numbers the engines of this mesh from 1, in the order in which they are made: ranks compare the numbers when they
  /// seal. Used by Engine.
  int number_engine() { return ++engines_; }
  /// Frees the number of an engine that was never sealed, if no other engine was made after it.
  void forget_engine(int number) {
    if (number == engines_) --engines_;
  }

 private:
  C world_;
  int engines_ = 0;
};

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE
