// SPDX-License-Identifier: Apache-2.0
// A mesh: the ranks of a run.
#pragma once

#include <utility>

#include "fsdp/concepts.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE {

/// The world of ranks, which engines divide by their strategies. Must outlive them.
template <Communicator C>
class Mesh {
 public:
  using Comm = C;

  explicit Mesh(C world) : world_(std::move(world)) {}

  C& world() { return world_; }
  int rank() const { return world_.rank(); }
  int size() const { return world_.size(); }
  typename C::Device const& device() const { return world_.device(); }

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
