// SPDX-License-Identifier: Apache-2.0
// One rank of a scenario: makes its calls over a trainer, and plays the tricks among them.
#pragma once

#include <chrono>
#include <cstddef>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "tests/fuzz/scenario.hpp"
#include "tests/support/trial/draw.hpp"
#include "tests/support/trial/reference.hpp"
#include "tests/support/trial/text.hpp"
#include "tests/support/trial/trainer.hpp"

namespace fuzz {

using trial::Inside;

/// The exception of user code in these runs.
struct Fault : std::runtime_error {
  using std::runtime_error::runtime_error;
};
/// A call that should have been refused, or a module that should have been run, was not.
struct Unexpected : std::logic_error {
  using std::logic_error::logic_error;
};

[[noreturn]] inline void throw_fault(Trick trick, std::string const& text) {
  if (trick == Trick::throws_other) throw 42;
  throw Fault(text);
}

class Rank {
 public:
  Rank(int rank, Plan const& plan, trial::Trainer& trainer)
      : rank_(rank), plan_(&plan), trainer_(&trainer), delays_(static_cast<std::uint64_t>(rank)) {}

  /// @return false if the rank returns early
  bool run(std::vector<Call> const& calls) {
    trainer_->begin();
    for (std::size_t at = 0; at < calls.size(); ++at) {
      auto const& call = calls[at];
      dawdle();
      if (call.trick == Trick::returns) return false;
      if (call.trick == Trick::outside) throw Fault(fault_text(rank_, "the caller"));
      if (call.trick == Trick::refused) {
        refuse(call.op);
      } else if (call.caught) {
        catching(call, at);
      } else {
        trainer_->run(call.op, inside(call, at));
        if (call.trick == Trick::task_behind)
          trainer_->compute().enqueue([text = fault_text(rank_, "a task")] { throw Fault(text); });
      }
    }
    trainer_->end(plan_->end == Trick::none ? Inside() : Inside([this](fsdp::host::Stream&) {
      throw_fault(plan_->end, fault_text(rank_, "the reader"));
    }));
    return true;
  }

 private:
  void refuse(Op const& op) {
    try {
      trainer_->run(op);
    } catch (fsdp::PeerError const&) {
      throw;
    } catch (fsdp::Error const&) {
      return;
    }
    throw Unexpected("was not refused: " + literal(op));
  }
  void catching(Call const& call, std::size_t at) {
    try {
      trainer_->run(call.op, inside(call, at));
    } catch (Fault const&) {
      return;
    } catch (int) {
      return;
    }
    throw Unexpected("ran without its fault: " + literal(call.op));
  }
  void dawdle() {
    if (plan_->delay_us > 0)
      std::this_thread::sleep_for(std::chrono::microseconds{delays_.between(0, plan_->delay_us)});
  }
  /// In one of the modules that the call runs.
  Inside inside(Call const& call, std::size_t at) {
    if (call.trick == Trick::none || call.trick == Trick::task_behind) {
      if (plan_->delay_us == 0) return {};
      return [this](fsdp::host::Stream& stream) {
        stream.enqueue([span = std::chrono::microseconds{delays_.between(0, plan_->delay_us)}] {
          std::this_thread::sleep_for(span);
        });
      };
    }
    auto const parts = plan_->trial.model.parts.size();
    auto const turn = call.op.to == Op::all ? at % parts : 0;
    auto const text = fault_text(rank_, plan_->trial.model.parts[call.op.from + turn].prefix);
    return [this, &call, turn, text, calls = std::size_t{}](fsdp::host::Stream& stream) mutable {
      if (calls++ != turn) return;
      switch (call.trick) {
        case Trick::task: stream.enqueue([text] { throw Fault(text); }); break;
        case Trick::task_waits:
          stream.enqueue([text] { throw Fault(text); });
          stream.synchronize();
          break;
        case Trick::gather_task: trainer_->gather().enqueue([text] { throw Fault(text); }); break;
        case Trick::nested: refuse(call.other); break;
        case Trick::calls: trainer_->run(call.other); break;
        default: throw_fault(call.trick, text); break;
      }
    };
  }

  int rank_;
  Plan const* plan_;
  trial::Trainer* trainer_;
  trial::Draw delays_;
};

/// Reference results of the calls that are neither refused nor ended by an exception.
inline trial::Reference reference_of(Plan const& plan, trial::Tensors<float> const& initial) {
  trial::Reference reference(plan.trial, initial);
  for (auto const& call : plan.afresh.empty() ? plan.calls : plan.afresh) {
    if (call.trick == Trick::calls) reference.run(call.other);
    if (call.trick == Trick::none || call.trick >= Trick::nested) reference.run(call.op);
  }
  return reference;
}

}  // namespace fuzz
