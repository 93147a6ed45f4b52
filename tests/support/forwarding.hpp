// SPDX-License-Identifier: Apache-2.0
// A communicator that passes all calls on to another one; a class derived from it does something before collectives.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "fsdp/concepts.hpp"

namespace fsdp::testing {

/// @tparam Derived  has `before(stream, label)`, called on the host before each collective that moves data; for one
///                  kind of collective it may hide the function. And `split`
/// @tparam C        the other communicator
template <class Derived, class C>
class Forwarding {
 public:
  using Device = typename C::Device;
  using Stream = typename Device::Stream;

  int rank() const { return inner_.rank(); }
  int size() const { return inner_.size(); }
  Device const& device() const { return inner_.device(); }
  void* allocate(std::size_t bytes) { return inner_.allocate(bytes); }
  void deallocate(void* memory, std::size_t bytes) noexcept { inner_.deallocate(memory, bytes); }
  template <class S, class T>
  Ticket all_gather(S& stream, T const* send, T* recv, std::size_t count, Label label) {
    derived().before(stream, label);
    return inner_.all_gather(stream, send, recv, count, label);
  }
  template <class S, class T>
  Ticket reduce_scatter(S& stream, T const* send, T* recv, std::size_t count, Label label) {
    derived().before(stream, label);
    return inner_.reduce_scatter(stream, send, recv, count, label);
  }
  template <class S, class T>
  Ticket all_reduce(S& stream, T const* send, T* recv, std::size_t count, Label label) {
    derived().before(stream, label);
    return inner_.all_reduce(stream, send, recv, count, label);
  }
  template <class S, class T>
  Ticket broadcast(S& stream, T* buffer, std::size_t count, int root, Label label) {
    derived().before(stream, label);
    return inner_.broadcast(stream, buffer, count, root, label);
  }
  template <class S>
  void wait_for_peers(S& stream, Ticket ticket, WaitSite site) {
    inner_.wait_for_peers(stream, ticket, site);
  }
  std::vector<std::string> exchange(std::string const& mine, std::string_view what) {
    return inner_.exchange(mine, what);
  }

 protected:
  explicit Forwarding(C inner) : inner_(std::move(inner)) {}
  C& inner() { return inner_; }

 private:
  Derived& derived() { return static_cast<Derived&>(*this); }

  C inner_;
};

}  // namespace fsdp::testing
