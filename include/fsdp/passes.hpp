// SPDX-License-Identifier: Apache-2.0
// Forward and backward passes over the declared uses: what each gathers, keeps, drops and reduces.
#pragma once

#include <cstddef>
#include <string_view>
#include <utility>
#include <vector>

#include "fsdp/concepts.hpp"
#include "fsdp/declaration.hpp"
#include "fsdp/error.hpp"
#include "fsdp/flat_param.hpp"
#include "fsdp/reducer.hpp"
#include "fsdp/schedule.hpp"
#include "fsdp/strategy.hpp"
#include "fsdp/unsharder.hpp"

namespace fsdp {

/// What backward does when it ends with a unit.
struct BackwardFlags {
  bool gradient_sync = true;  ///< reduces
  bool replica_sync = true;   ///< and sums over replicas
  bool reshard = true;        ///< drops parameters
};

/// The state of an engine's passes. Everything it refers to belongs to the engine.
template <Strategy S, Communicator C, class P>
class Passes {
 public:
  using D = typename C::Device;
  using Stream = typename D::Stream;
  using Unit = FlatParam<D, P>;

  Passes(int rank, Declaration<S, D, P>& declared, Unsharder<C, P>& gather, Reducer<C, P>& reduce, Stream& compute)
      : rank_(rank), declared_(&declared), gather_(&gather), reduce_(&reduce), compute_(&compute) {}

  /// What each use gathers ahead: known once the engine is sealed.
  void set_ahead(PrefetchLists ahead) { ahead_ = std::move(ahead); }
  /// Flags of the next backward pass to begin.
  BackwardFlags& next_backward() { return next_; }
  void set_evaluating(bool on) { evaluating_ = on; }

  Unit& begin_forward(std::size_t use) {
    if (schedule().begin_forward(use)) {
      if (!std::exchange(kept_after_backward_, false)) reshard_all();
      gather_->pool().restart();
    }
    return gather_for(use, ahead_.forward[use], "forward");
  }

  void end_forward(std::size_t use) {
    schedule().end_forward(use);
    if (schedule().keeps_after_forward(use, declared_->keep_rules(), evaluating_)) return;
    auto& unit = unit_of(use);
    if (evaluating_) {
      gather_->reshard(unit, *compute_);
    } else {
      gather_->reshard_after_forward(unit, *compute_);
    }
  }

  Unit& begin_backward(std::size_t use) {
    FSDP_EXPECTS(!evaluating_, "rank {}: backward of '{}' inside an evaluation", rank_, schedule().module_name(use));
    if (schedule().begin_backward(use)) {
      reduce_->restart();
      pass_ = next_;
    }
    auto& unit = gather_for(use, ahead_.backward[use], "backward");
    if (schedule().last_use_of_unit(use)) reduce_->lease(unit, *compute_);
    return unit;
  }

  void end_backward(std::size_t use) {
    bool const complete = schedule().end_backward(use);
    auto& unit = unit_of(use);
    if (schedule().first_use_of_unit(use)) {
      if (pass_.reshard) gather_->reshard(unit, *compute_);
      bool const reduces = pass_.gradient_sync && (pass_.replica_sync || !reduce_->direct());
      if (reduces) {
        reduce_->reduce(unit, *compute_, pass_.replica_sync);
      } else {
        reduce_->hold(unit, *compute_);
      }
    }
    if (!complete) return;
    reduce_->finish();
    kept_after_backward_ = !pass_.reshard;
  }

  /// Forgets a pass under way: every unit is dropped, the next use starts a new forward pass.
  void abandon() {
    schedule().reset();
    reshard_all();
  }

 private:
  Schedule& schedule() { return declared_->schedule(); }
  Unit& unit_of(std::size_t use) { return *declared_->units()[schedule().unit(use)]; }

  /// The unit's parameters, with `ahead` on their way.
  Unit& gather_for(std::size_t use, std::vector<std::size_t> const& ahead, std::string_view pass) {
    auto& unit = unit_of(use);
    FSDP_EXPECTS(gather_->unshard(unit, pass), "rank {}: unit '{}': no buffer is free", rank_, unit.name());
    for (auto const next : ahead)
      if (!gather_->unshard(unit_of(next), pass)) break;
    gather_->wait_for_unshard(unit, *compute_);
    return unit;
  }
  void reshard_all() {
    for (auto& unit : declared_->units()) gather_->reshard(*unit, *compute_);
    kept_after_backward_ = false;
  }

  int rank_;
  Declaration<S, D, P>* declared_;
  Unsharder<C, P>* gather_;
  Reducer<C, P>* reduce_;
  Stream* compute_;
  PrefetchLists ahead_;  ///< by use
  BackwardFlags next_;   ///< as set
  BackwardFlags pass_;   ///< of the backward pass under way
  bool evaluating_ = false;
  bool kept_after_backward_ = false;  ///< the last backward pass left the parameters unsharded
};

}  // namespace fsdp
