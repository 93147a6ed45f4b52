// SPDX-License-Identifier: Apache-2.0
// Forward and backward passes over sharded torch modules: autograd's hooks begin and end the uses of an engine.
#pragma once

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/torch.h>

#include <ATen/ATen.h>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "fsdp/detail/libtorch/unit.hpp"
#include "fsdp/detail/step/program.hpp"
#include "fsdp/error.hpp"
#include "fsdp/options.hpp"
#include "fsdp/version.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE::libtorch {

namespace detail {

template <class T>
concept TupleLike = requires {
  std::tuple_size<T>::value;
};
template <class T>
concept OptionalLike = requires(T const& value) {
  value.has_value();
  *value;
};
template <class T>
concept RangeLike = requires(T const& value) {
  value.begin();
  value.end();
};
struct Ignore {
  void operator()(at::Tensor const&) const {}
};
/// A type of the user's with a function visit_tensors(value, f) in its namespace, which calls f(tensor) for each
/// tensor.
template <class T>
concept VisitsTensors = requires(T const& value, Ignore const& f) {
  visit_tensors(value, f);
};
template <class T>
inline constexpr bool has_no_tensors =
    std::is_arithmetic_v<T> || std::is_enum_v<T> || std::is_same_v<T, std::string> || std::is_null_pointer_v<T>;

}  // namespace detail

/// Calls `f(tensor)` for each tensor in `value`: a tensor, a tuple, pair, array, vector, map or optional of these, or a
/// type with a function `visit_tensors(T const&, F const&)` of its own. A tensor that is left out would get no hook,
/// and its unit would reduce gradients that are not complete: other types do not compile.
template <class T, class F>
void each_tensor(T const& value, F const& f) {
  if constexpr (std::is_convertible_v<T const&, at::Tensor const&>) {
    f(static_cast<at::Tensor const&>(value));
  } else if constexpr (detail::VisitsTensors<T>) {
    visit_tensors(value, f);
  } else if constexpr (detail::has_no_tensors<T>) {
  } else if constexpr (detail::TupleLike<T>) {
    std::apply([&](auto const&... part) { (each_tensor(part, f), ...); }, value);
  } else if constexpr (detail::OptionalLike<T>) {
    if (value.has_value()) each_tensor(*value, f);
  } else if constexpr (detail::RangeLike<T>) {
    for (auto const& part : value) each_tensor(part, f);
  } else {
    static_assert(detail::VisitsTensors<T>,
                  "fsdp: forward of a sharded module returns a type in which fsdp does not find the tensors. Give the "
                  "type's namespace a function template <class F> void visit_tensors(T const& value, F const& f) that "
                  "calls f(tensor) for each tensor");
  }
}

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE::libtorch

namespace fsdp::inline FSDP_VERSION_NAMESPACE::libtorch::detail {

/// Interface of an engine for passes: one use at a time, as HeldUse.
class EngineUses {
 public:
  virtual ~EngineUses() = default;
  virtual int rank() const = 0;
  virtual void begin(Pass pass, UseId use) = 0;
  virtual void end() = 0;
  virtual void abandon() noexcept = 0;
  /// A use is open, and has parameters.
  virtual bool is_open() const = 0;
  /// @pre is_open() @param of  number of the unit
  virtual TorchBuffers buffers(std::size_t of, bool backward) const = 0;
  /// See FlatParam::begin_write.
  virtual bool begin_write(std::size_t of, std::size_t index) = 0;
  /// Turns of the pass under way that are complete.
  virtual std::size_t turns_done() const = 0;
  virtual void discard_gradients() = 0;
  /// Gives all ranks rank 0's buffers of the modules. @note Collective: yes.
  virtual void broadcast_buffers() = 0;
  /// @throws UsageError if the thread's current stream of torch is not the engine's compute stream
  virtual void expect_stream(std::string_view unit) const = 0;
};

/// [Note: Uses from hooks]
/// Forward is a call, so its use is a scope around it. Backward is autograd's: each output of a forward has a hook,
/// which autograd calls when the output's gradient is complete, before the node that made the output runs. Autograd
/// runs the ready node that was made last, and AccumulateGrad as soon as it is ready (Node::sequence_nr). So when that
/// hook is called, all nodes of later uses have run, with their AccumulateGrad, and none of this use: the hook ends the
/// use before, runs those between, which autograd does not visit, and begins its own. A callback at the end of backward
/// ends the last use, and runs the rest. A tied parameter has one AccumulateGrad, which runs in its earliest use.
///
/// A use that ran forward and gets no gradient reduces zeros: peers may have one.
class Passes : public std::enable_shared_from_this<Passes> {
 public:
  explicit Passes(std::unique_ptr<EngineUses> engine) : engine_(std::move(engine)) {}
  Passes(Passes const&) = delete;
  ~Passes() { engine_->abandon(); }

  int rank() const { return engine_->rank(); }
  std::vector<std::unique_ptr<TorchUnit>>& units() { return units_; }
  TorchUnit& unit_of(std::size_t use) const { return *uses_[use].unit; }
  UseId id_of(std::size_t use) const { return uses_[use].id; }
  /// @return its number
  std::size_t add_use(TorchUnit& unit, UseId id, std::string name) {
    uses_.push_back({&unit, id, std::move(name)});
    return uses_.size() - 1;
  }
  std::size_t use_count() const { return uses_.size(); }
  /// Forgets what was registered last. @pre no pass has begun
  void truncate(std::size_t units, std::size_t uses) noexcept {
    while (uses_.size() > uses) uses_.pop_back();
    while (units_.size() > units) units_.pop_back();
  }

  /// @throws UsageError after a backward() that has ended with an exception, or if a parameter's requires_grad has
  /// changed; OrderError if another use comes next
  /// @note Collective: the first time, it broadcasts the buffers of all modules too.
  void begin_forward(std::size_t use) {
    auto& unit = *uses_[use].unit;
    expect_no_half_pass(formatted("forward of '{}' begins", uses_[use].name));
    FSDP_EXPECTS(!is_in_forward_,
                 "rank {}: '{}' is called inside the forward of '{}', and units do not nest: register the parts of a "
                 "module, or the module, not both",
                 rank(), uses_[use].name, uses_[calls_.back()].name);
    engine_->expect_stream(unit.name());
    for (auto const& parameter : unit.parameters())
      FSDP_EXPECTS(
          parameter.tensor.requires_grad() == parameter.trains,
          "rank {}: unit '{}': requires_grad of parameter '{}' has changed: it is {}, and was {} when the unit "
          "was sharded; freeze parameters before Sharder::shard",
          rank(), unit.name(), parameter.name, !parameter.trains, parameter.trains);
    if (!has_begun_) engine_->broadcast_buffers();
    has_begun_ = true;
    engine_->begin(Pass::forward, uses_[use].id);
    if (engine_->turns_done() == 0) {
      calls_.clear();
      ++pass_;
      has_run_backward_ = false;
    }
    calls_.push_back(use);
    is_in_forward_ = true;
    open(unit, false);
  }
  /// An output of the forward that is open: its gradient begins the use in backward.
  /// @throws UsageError if it is a view of a parameter
  void watch(at::Tensor const& output) {
    if (!output.defined()) return;
    auto const& use = uses_[calls_.back()];
    FSDP_EXPECTS(!use.unit->holds(output),
                 "rank {}: unit '{}' returns a view of its parameter, which is not there after its forward; return a "
                 "clone",
                 rank(), use.name);
    if (!output.requires_grad()) return;
    output.register_hook([weak = weak_from_this(), at = calls_.size() - 1, pass = pass_](at::Tensor const&) {
      locked(weak)->begin_backward(at, pass);
    });
  }
  /// @throws UsageError, and the use is still open, if forward has written a parameter
  void end_forward() {
    expect_unwritten();
    is_in_forward_ = false;
    close();
    engine_->end();
  }
  void abandon_forward() noexcept {
    if (!std::exchange(is_in_forward_, false)) return;
    close();
    engine_->abandon();
  }

  /// As Engine::discard_gradients, also after an exception out of a backward().
  void discard_gradients() {
    if (is_running_) {
      close();
      engine_->abandon();
      is_running_ = is_in_use_ = false;
      has_run_backward_ = true;
    }
    engine_->discard_gradients();
  }
  /// Autograd has accumulated a parameter's gradient.
  static void come(std::weak_ptr<Passes> const& weak, TorchParameter& parameter) { locked(weak)->come(parameter); }

 private:
  struct Use {
    TorchUnit* unit;
    UseId id;
    std::string name;
  };

  static std::shared_ptr<Passes> locked(std::weak_ptr<Passes> const& weak) {
    auto passes = weak.lock();
    FSDP_EXPECTS(passes != nullptr, "backward() of sharded modules was called after their Sharder has ended");
    return passes;
  }
  void expect_no_half_pass(std::string_view what) const {
    FSDP_EXPECTS(!is_running_,
                 "rank {}: {}, but a backward() has ended with an exception, or has not ended; call "
                 "Sharder::discard_gradients() first, on all ranks",
                 rank(), what);
  }
  void expect_unwritten() const {
    auto const* const written = open_ != nullptr ? open_->written() : nullptr;
    FSDP_EXPECTS(written == nullptr,
                 "rank {}: unit '{}': parameter '{}' was written in its forward or backward, where it is a copy: the "
                 "write would be lost. Let optimizers change parameters (and Embedding without max_norm)",
                 rank(), open_->name(), written->name);
  }
  void open(TorchUnit& unit, bool backward) {
    open_ = &unit;
    unit.open([&](std::size_t of) { return engine_->buffers(of, backward); }, backward);
  }
  void close() noexcept {
    if (auto* const unit = std::exchange(open_, nullptr)) unit->close();
  }

  /// The gradient of an output of call `at` is complete.
  void begin_backward(std::size_t at, std::uint64_t pass) {
    auto const& use = uses_[pass == pass_ ? calls_[at] : 0];
    FSDP_EXPECTS(
        pass == pass_,
        "rank {}: backward() comes to the graph of an earlier forward pass: a pass has run forward since, whose "
        "gradients would be lost. Call backward() once for each forward pass, before the next one begins",
        rank());
    FSDP_EXPECTS(
        !has_run_backward_,
        "rank {}: backward() comes to unit '{}' a second time (retain_graph): its parameters were resharded, and "
        "the gradients of the first time are on their way. Run forward again",
        rank(), use.name);
    engine_->expect_stream(use.name);
    if (!is_running_) begin_pass(use.name);
    if (at >= next_) return;  // another output of a use that has begun
    end_use();
    skip_to(at + 1);
    begin_use(at);
    FSDP_EXPECTS(
        engine_->is_open() || use.unit->parameters().empty(),
        "rank {}: unit '{}' is frozen, as are all units before it, but its input requires a gradient: backward "
        "passes do not come to it. Detach the input, or use Engine::frozen_parameters",
        rank(), use.name);
  }
  void begin_pass(std::string_view unit) {
    FSDP_EXPECTS(!at::GradMode::is_enabled(),
                 "rank {}: backward() of unit '{}' with create_graph: gradients of gradients need parameters that were "
                 "resharded",
                 rank(), unit);
    auto const* const inputs = torch::autograd::get_current_graph_task_exec_info();
    FSDP_EXPECTS(inputs == nullptr || inputs->empty(),
                 "rank {}: backward() or grad() of unit '{}' for chosen inputs: gradients of parameters that are not "
                 "accumulated would be lost. Call backward() without inputs",
                 rank(), unit);
    torch::autograd::Engine::get_default_engine().queue_callback(
        [weak = weak_from_this()] { locked(weak)->end_pass(); });
    is_running_ = true;
    next_ = calls_.size();
  }
  void begin_use(std::size_t at) {
    auto const& use = uses_[calls_[at]];
    engine_->begin(Pass::backward, use.id);
    is_in_use_ = true;
    next_ = at;
    if (engine_->is_open()) open(*use.unit, true);
  }
  void end_use() {
    if (!std::exchange(is_in_use_, false)) return;
    expect_unwritten();
    if (auto* const unit = open_) {
      torch::NoGradGuard const no_grad;
      for (auto& parameter : unit->parameters()) {
        if (!parameter.trains || parameter.has_come || !wants_gradients(parameter)) continue;
        FSDP_EXPECTS(!parameter.tensor.grad().defined(),
                     "rank {}: unit '{}': the program has set the gradient of parameter '{}' in backward, where it "
                     "would be lost",
                     rank(), unit->name(), parameter.name);
        if (engine_->begin_write(parameter.unit, parameter.index)) parameter.gradient.zero_();
      }
    }
    close();
    engine_->end();
  }
  /// Uses that autograd does not visit.
  void skip_to(std::size_t at) {
    while (next_ > at) {
      begin_use(next_ - 1);
      end_use();
    }
  }
  void end_pass() {
    end_use();
    skip_to(0);
    is_running_ = false;
    has_run_backward_ = true;
  }
  bool wants_gradients(TorchParameter const& parameter) const {
    return engine_->buffers(parameter.unit, true).gradients != nullptr;
  }
  void come(TorchParameter& parameter) {
    torch::NoGradGuard const no_grad;
    auto const gradient = std::exchange(parameter.tensor.mutable_grad(), at::Tensor());
    TorchUnit::refuse_gradient(parameter);
    engine_->expect_stream(parameter.name);
    parameter.has_come = true;
    if (!wants_gradients(parameter)) return;
    bool const begins = engine_->begin_write(parameter.unit, parameter.index);
    if (begins && gradient.is_sparse()) parameter.gradient.zero_();
    if (begins && !gradient.is_sparse())
      parameter.gradient.copy_(gradient);
    else
      parameter.gradient.add_(gradient);
  }

  std::unique_ptr<EngineUses> engine_;
  std::vector<std::unique_ptr<TorchUnit>> units_;
  std::vector<Use> uses_;
  std::vector<std::size_t> calls_;  ///< uses of the last forward pass, in order
  std::uint64_t pass_ = 0;          ///< number of the last forward pass
  bool has_begun_ = false;          ///< the first of them
  bool has_run_backward_ = false;   ///< of that pass
  bool is_in_forward_ = false;      ///< a forward has begun and not ended
  bool is_running_ = false;         ///< a backward pass has begun and not ended
  bool is_in_use_ = false;          ///< a use of it
  std::size_t next_ = 0;            ///< backward: the call that has begun last; calls_.size(): none
  TorchUnit* open_ = nullptr;       ///< of the use that is open, if it has parameters
};

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE::libtorch::detail
