// SPDX-License-Identifier: Apache-2.0
// The ranks of a run.
#pragma once

#include <utility>

#include "fsdp/concepts.hpp"

namespace fsdp {

/// The world of ranks that engines divide, each as its strategy says. Must outlive them.
template <Communicator C>
class Mesh {
 public:
  using Comm = C;

  explicit Mesh(C world) : world_(std::move(world)) {}

  C& world() { return world_; }
  int rank() const { return world_.rank(); }
  int size() const { return world_.size(); }
  typename C::Device const& device() const { return world_.device(); }

 private:
  C world_;
};

}  // namespace fsdp
