// SPDX-License-Identifier: Apache-2.0
// The ranks of a run on one kind of device, be they threads or processes, behind one type.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "fsdp/concepts.hpp"
#include "fsdp/host.hpp"
#include "fsdp/kernels.hpp"
#include "fsdp/tensor.hpp"

namespace transformer {

/// A communicator that hands every call on to another one of the same device, chosen at run time: engines and trainers
/// are compiled once for all of them. It has what engines in fp32 and in bf16 with fp32 gradients ask for, and sums of
/// gradients rounded to bf16. The contracts (who may read what when, what blocks, what is collective, what is thrown)
/// are the other one's.
template <fsdp::Device D>
class World {
 public:
  using Device = D;
  using Stream = typename D::Stream;
  using Label = fsdp::Label;
  using Ticket = fsdp::Ticket;

  /// The ranks of `communicator`, which it takes over.
  template <fsdp::Communicator C>
  static World of(C communicator) {
    return World(std::make_unique<Holder<C>>(std::move(communicator)));
  }

  int rank() const { return held_->rank(); }
  int size() const { return held_->size(); }
  Device const& device() const { return held_->device(); }
  World split(int color, int key, std::string_view what) { return World(held_->split(color, key, what)); }
  void* allocate(std::size_t bytes) { return held_->allocate(bytes); }
  void deallocate(void* memory, std::size_t bytes) noexcept { held_->deallocate(memory, bytes); }
  void register_memory(void* memory, std::size_t bytes) { held_->register_memory(memory, bytes); }
  Ticket all_gather(Stream& stream, float const* send, float* receive, std::size_t count, Label label) {
    return held_->all_gather(stream, send, receive, count, label);
  }
  Ticket all_gather(Stream& stream, fsdp::bf16 const* send, fsdp::bf16* receive, std::size_t count, Label label) {
    return held_->all_gather(stream, send, receive, count, label);
  }
  Ticket reduce_scatter(Stream& stream, float const* send, float* receive, std::size_t count, Label label) {
    return held_->reduce_scatter(stream, send, receive, count, label);
  }
  Ticket reduce_scatter(Stream& stream, fsdp::bf16 const* send, fsdp::bf16* receive, std::size_t count, Label label) {
    return held_->reduce_scatter(stream, send, receive, count, label);
  }
  Ticket all_reduce(Stream& stream, fsdp::bf16 const* send, fsdp::bf16* receive, std::size_t count, Label label) {
    return held_->all_reduce(stream, send, receive, count, label);
  }
  Ticket all_reduce(Stream& stream, float const* send, float* receive, std::size_t count, Label label) {
    return held_->all_reduce(stream, send, receive, count, label);
  }
  Ticket all_reduce(Stream& stream, double const* send, double* receive, std::size_t count, Label label) {
    return held_->all_reduce(stream, send, receive, count, label);
  }
  Ticket all_reduce_mean(Stream& stream, float const* send, float* receive, std::size_t count, Label label) {
    return held_->all_reduce_mean(stream, send, receive, count, label);
  }
  Ticket broadcast(Stream& stream, float* data, std::size_t count, int root, Label label) {
    return held_->broadcast(stream, data, count, root, label);
  }
  void wait_for_peers(Stream& stream, Ticket ticket, fsdp::WaitSite site) {
    held_->wait_for_peers(stream, ticket, site);
  }
  std::vector<std::string> exchange(std::string const& text, std::string_view what) {
    return held_->exchange(text, what);
  }

 private:
  struct Held {
    Held() = default;
    Held(Held const&) = delete;
    Held& operator=(Held const&) = delete;
    virtual ~Held() = default;
    virtual int rank() const = 0;
    virtual int size() const = 0;
    virtual Device const& device() const = 0;
    virtual std::unique_ptr<Held> split(int color, int key, std::string_view what) = 0;
    virtual void* allocate(std::size_t bytes) = 0;
    virtual void deallocate(void* memory, std::size_t bytes) noexcept = 0;
    virtual void register_memory(void* memory, std::size_t bytes) = 0;
    virtual Ticket all_gather(Stream&, float const*, float*, std::size_t, Label) = 0;
    virtual Ticket all_gather(Stream&, fsdp::bf16 const*, fsdp::bf16*, std::size_t, Label) = 0;
    virtual Ticket reduce_scatter(Stream&, float const*, float*, std::size_t, Label) = 0;
    virtual Ticket reduce_scatter(Stream&, fsdp::bf16 const*, fsdp::bf16*, std::size_t, Label) = 0;
    virtual Ticket all_reduce(Stream&, fsdp::bf16 const*, fsdp::bf16*, std::size_t, Label) = 0;
    virtual Ticket all_reduce(Stream&, float const*, float*, std::size_t, Label) = 0;
    virtual Ticket all_reduce(Stream&, double const*, double*, std::size_t, Label) = 0;
    virtual Ticket all_reduce_mean(Stream&, float const*, float*, std::size_t, Label) = 0;
    virtual Ticket broadcast(Stream&, float*, std::size_t, int, Label) = 0;
    virtual void wait_for_peers(Stream&, Ticket, fsdp::WaitSite) = 0;
    virtual std::vector<std::string> exchange(std::string const& text, std::string_view what) = 0;
  };

  template <class C>
  struct Holder final : Held {
    explicit Holder(C communicator) : world(std::move(communicator)) {}
    int rank() const override { return world.rank(); }
    int size() const override { return world.size(); }
    Device const& device() const override { return world.device(); }
    std::unique_ptr<Held> split(int color, int key, std::string_view what) override {
      return std::make_unique<Holder>(world.split(color, key, what));
    }
    void* allocate(std::size_t bytes) override { return world.allocate(bytes); }
    void deallocate(void* memory, std::size_t bytes) noexcept override { world.deallocate(memory, bytes); }
    void register_memory(void* memory, std::size_t bytes) override {
      if constexpr (fsdp::RegistersMemory<C>) {
        world.register_memory(memory, bytes);
      } else {
        static_cast<void>(memory), static_cast<void>(bytes);
      }
    }
    Ticket all_gather(Stream& stream, float const* send, float* receive, std::size_t count, Label label) override {
      return world.all_gather(stream, send, receive, count, label);
    }
    Ticket all_gather(Stream& stream, fsdp::bf16 const* send, fsdp::bf16* receive, std::size_t count,
                      Label label) override {
      return world.all_gather(stream, send, receive, count, label);
    }
    Ticket reduce_scatter(Stream& stream, float const* send, float* receive, std::size_t count, Label label) override {
      return world.reduce_scatter(stream, send, receive, count, label);
    }
    Ticket reduce_scatter(Stream& stream, fsdp::bf16 const* send, fsdp::bf16* receive, std::size_t count,
                          Label label) override {
      return world.reduce_scatter(stream, send, receive, count, label);
    }
    Ticket all_reduce(Stream& stream, fsdp::bf16 const* send, fsdp::bf16* receive, std::size_t count,
                      Label label) override {
      return world.all_reduce(stream, send, receive, count, label);
    }
    Ticket all_reduce(Stream& stream, float const* send, float* receive, std::size_t count, Label label) override {
      return world.all_reduce(stream, send, receive, count, label);
    }
    Ticket all_reduce(Stream& stream, double const* send, double* receive, std::size_t count, Label label) override {
      return world.all_reduce(stream, send, receive, count, label);
    }
    Ticket all_reduce_mean(Stream& stream, float const* send, float* receive, std::size_t count, Label label) override {
      return fsdp::kernels::all_reduce_mean(world, stream, send, receive, count, label);
    }
    Ticket broadcast(Stream& stream, float* data, std::size_t count, int root, Label label) override {
      return world.broadcast(stream, data, count, root, label);
    }
    void wait_for_peers(Stream& stream, Ticket ticket, fsdp::WaitSite site) override {
      world.wait_for_peers(stream, ticket, site);
    }
    std::vector<std::string> exchange(std::string const& text, std::string_view what) override {
      return world.exchange(text, what);
    }
    C world;
  };

  explicit World(std::unique_ptr<Held> held) : held_(std::move(held)) {}

  std::unique_ptr<Held> held_;
};

static_assert(fsdp::RegistersMemory<World<fsdp::host::Device>> && fsdp::TakesMeans<World<fsdp::host::Device>>);

}  // namespace transformer
