// SPDX-License-Identifier: Apache-2.0
// The machine of passes: which use comes next, which operations of the program run then, and what is refused.
// Engines, simulators, checks and the plan of events are driven by it. Host logic only: a performer moves the data.
// step::Run runs a program without a device.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "fsdp/detail/base/fixed_array.hpp"
#include "fsdp/detail/step/contents.hpp"
#include "fsdp/detail/step/operation.hpp"
#include "fsdp/detail/step/program.hpp"
#include "fsdp/detail/step/uses.hpp"
#include "fsdp/error.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE::step {

/// Flags of the passes of a run, each of which depends on the one before.
class PassFlags {
 public:
  /// Flags of the pass in progress, or of the last one.
  StepFlags now() const { return now_; }
  /// Begins a forward pass. @return whether parameters left by earlier passes are dropped first
  bool begin_forward() {
    now_ = left_;
    forget_parameters();
    return (now_ & starts_sharded) != 0;
  }
  void begin_backward(BackwardFlags flags) { now_ = flags.step_flags() | (left_ & waiting_flags); }
  void end_backward() { left_ = flags_after(now_); }
  /// Begins a pass that writes no gradients: those of earlier passes wait as before.
  void begin_frozen_backward(BackwardFlags flags) {
    now_ = (flags.step_flags() & reshard_flags) | syncs_all | (left_ & waiting_flags);
  }
  void end_frozen_backward() { left_ = (flags_after(now_) & start_flags) | (left_ & waiting_flags); }
  /// Records that the next forward pass finds no parameters of an earlier backward pass.
  void forget_parameters() { left_ = starts_sharded | (left_ & waiting_flags); }
  void forget_gradients() { left_ = (left_ & start_flags) | all_reduced; }

 private:
  StepFlags now_ = plain_step;
  StepFlags left_ = flags_after(plain_step);  ///< state that the last complete pass has left
};

/// The place of an operation in a run.
struct RunPosition {
  static constexpr std::uint32_t no_use = ~0u;

  std::uint32_t step = 0;  ///< optimizer steps so far
  /// Number of the backward pass in the run, from 1; a forward pass has the number of the backward pass that follows.
  std::uint32_t micro_step = 0;
  std::uint32_t use = no_use;       ///< no_use: between uses
  PassKind kind{};                  ///< of the pass in progress, or of the last one
  StepFlags flags = plain_step;     ///< of the pass in progress, or of the last one
  std::uint32_t path = 0;           ///< of the pass in progress, or of the last one
  std::uint32_t index_in_path = 0;  ///< of the use
};

/// A scope in which passes follow a path.
struct FollowedPath {
  std::size_t path = 0;
  FollowedPath* before = nullptr;  ///< a scope that is older and lives
};

/// Counts scopes of Shards that read or write shards. While one is open, no use of a unit begins or ends: the gathers
/// and reductions of that use would not be ordered with the work that the scope enqueues.
class OpenAccesses {
 public:
  explicit OpenAccesses(int rank) : rank_(rank) {}

  /// Counts a reading scope while it lives.
  class Reading {
   public:
    explicit Reading(OpenAccesses& of) : of_(&of) { ++of.reads_; }
    Reading(Reading&&) = delete;
    ~Reading() { --of_->reads_; }

   private:
    OpenAccesses* of_;
  };
  /// Counts a writing scope while it lives.
  class Writing {
   public:
    /// @param alone  no other write may be open meanwhile: updates count, and offloaded state has one slot at a time
    /// @throws UsageError if another one is open, and one of the two must be alone
    Writing(OpenAccesses& of, std::string_view unit, bool alone) : of_(&of), alone_(alone) {
      FSDP_EXPECTS(of.writes_ == 0 || !(alone || of.alone_),
                   "rank {}: the shard of unit '{}' is to be written, but another write has not ended; end its scope "
                   "first",
                   of.rank_, unit);
      ++of.writes_;
      of.alone_ = alone;
    }
    Writing(Writing&&) = delete;
    ~Writing() {
      --of_->writes_;
      if (alone_) of_->alone_ = false;
    }

   private:
    OpenAccesses* of_;
    bool alone_;
  };

  /// @throws UsageError if a read or a write is open
  /// @param does  "begins" or "ends"
  void expect_none(UseKind kind, std::string_view module, std::string_view does) const {
    FSDP_EXPECTS(writes_ == 0 && reads_ == 0,
                 "rank {}: {} of '{}' {}, but a scope of Shards::{} has not ended; end it first", rank_, name(kind),
                 module, does, writes_ > 0 ? "write or update" : "read_gradients");
  }

 private:
  int rank_;
  int reads_ = 0, writes_ = 0;
  bool alone_ = false;  ///< the write that is open must be alone
};

/// State of the passes of an engine or a run, and what it allows. A pass follows the program's list of turns.
///
/// idle: only the first use of a forward pass may begin.
///
/// forward: the next use of this pass may begin. After its last use: forward_done.
///
/// forward_done: the first use of a backward pass may begin, or that of another forward pass.
///
/// backward: the next use of this pass may begin. After its last use: idle.
///
/// interrupted: an exception has ended a backward pass that writes gradients. No use may begin until gradients are
/// discarded; then idle.
class PassState {
 public:
  enum class Stage : unsigned char { idle, forward, forward_done, backward, interrupted };

  PassState(PassState const&) = delete;
  PassState& operator=(PassState const&) = delete;

  /// Whether there is a program.
  bool sealed() const { return program_ != nullptr; }
  /// @pre sealed
  Program const& program() const { return *program_; }
  Contents const& contents() const { return contents_; }
  /// The declared order of uses. nullptr: there was a program from the start
  UseOrder const* declared() const { return declared_; }
  bool has_paths() const { return program_ != nullptr && program_->paths() > 1; }
  /// Number of complete turns of the pass in progress, or of the last one.
  std::size_t turns_done() const { return done_; }
  /// Whether the pass in progress, or else the last one, is a backward pass that writes no gradients of parameters.
  bool freezes_parameters() const { return at_.kind == PassKind::frozen_backward; }
  std::uint32_t backward_passes() const { return backward_passes_; }  ///< begun so far: tells gradients apart
  OpenAccesses& accesses() { return accesses_; }

  /// Flags for the next backward pass.
  BackwardFlags next_backward() const { return {scopes_[0] == 0, scopes_[1] == 0, scopes_[2] == 0}; }
  /// Counts scopes: one begins (1) or ends (-1).
  void add_scope(BackwardChange change, int by) { scopes_[static_cast<std::size_t>(change)] += by; }
  /// Scopes of paths, the newest first: passes that begin follow its path. The caller owns them.
  FollowedPath*& followed() { return followed_; }

  /// Whether the unit has a gradient for the next step. @pre sealed
  bool has_gradient(std::size_t unit) const {
    return program_->units[unit].trains() && contents_[unit].gradient == Contents::Gradient::sum;
  }
  /// Whether the unit has a gradient for the next step, or, if no unit has, had one in the last step. @pre sealed
  bool exports_gradient(std::size_t unit) const {
    if (has_gradient(unit) || contents_[unit].gradient == Contents::Gradient::none) return has_gradient(unit);
    for (std::size_t u = 0; u < program_->units.size(); ++u)
      if (has_gradient(u)) return false;
    return program_->units[unit].trains() && (stepped_.empty() || stepped_[unit]);
  }

  /// Begins the updates of an optimizer step, which ends when every unit that has a gradient is updated. Until then
  /// parameters are incomplete.
  void begin_updates() {
    if (stepped_.empty()) stepped_ = detail::FixedArray<bool>(program_->units.size());
    to_update_ = 0;
    for (std::size_t u = 0; u < stepped_.size(); ++u) to_update_ += (stepped_[u] = has_gradient(u)) ? 1u : 0u;
    writer_ = to_update_ > 0 ? optimizer_step : std::string_view{};
  }
  /// @throws UsageError unless a step is under way in which the unit was not updated
  [[gnu::noinline]] void expect_update(std::size_t unit) const {
    auto const& updated = program_->units[unit];
    FSDP_EXPECTS(to_update_ > 0, "rank {}: update of unit '{}' outside a step; call begin_step first", rank_,
                 updated.name);
    FSDP_EXPECTS(!updated.frozen, "rank {}: update of unit '{}', which is frozen", rank_, updated.name);
    FSDP_EXPECTS(updated.empty() || contents_[unit].gradient == Contents::Gradient::sum,
                 "rank {}: unit '{}' was already updated in this step{}", rank_, updated.name,
                 has_paths() ? ", or has no gradient: see Shards::has_gradient" : "");
  }
  /// Records that the update of a unit has been enqueued: its gradient is used.
  void note_update(Operation const& operation) {
    contents_.apply(operation);
    if (to_update_ > 0 && --to_update_ == 0) writer_ = {};
  }
  /// Begins to replace parameters. Until end_replacing() they are incomplete. @param what  the writer, a literal
  void begin_replacing(std::string_view what) {
    expect_not_swapped(what);
    to_update_ = 0;
    writer_ = what;
  }
  void end_replacing() { writer_ = {}; }
  /// Records that averages replace the parameters of all units for a while: only evaluations and exports are allowed.
  void set_swapped(bool swapped) { swapped_ = swapped; }

  // In the following, `what` is the refused action, for the message.

  /// @throws UsageError inside a use
  void expect_closed(std::string_view what) const {
    FSDP_EXPECTS(!open_, "rank {}: {}, but {} of '{}' has not ended; end it first", rank_, what, name(open_kind()),
                 module_name(turn_->use));
  }
  /// @throws UsageError in the middle of a pass
  [[gnu::cold]] void expect_between_passes(std::string_view what) const {
    expect_closed(what);
    expect_whole_gradients(what);
    FSDP_EXPECTS(stage_ != Stage::forward,
                 "rank {}: {}, but a forward pass is incomplete. Complete it ('{}' comes next), or call "
                 "discard_gradients()",
                 rank_, what, module_name((*turns_)[done_].use));
  }
  /// @throws UsageError inside a use or an evaluation, or while parameters are written
  void expect_at_rest(std::string_view what) const {
    expect_closed(what);
    FSDP_EXPECTS(evaluations_ == 0, "rank {}: {} inside an evaluation; end the evaluation scope first", rank_, what);
    expect_whole_parameters(what);
  }
  /// @throws UsageError while averages of weights are in the place of parameters: see Ema::swap
  void expect_not_swapped(std::string_view what) const {
    FSDP_EXPECTS(!swapped_, "rank {}: {}, but averages of weights are swapped in; end the scope of Ema::swap first",
                 rank_, what);
  }
  /// @throws UsageError if an optimizer step, an import or a load has ended half-way
  void expect_whole_parameters(std::string_view what) const {
    if (!writer_.empty()) refuse_incomplete_parameters(what);
  }
  /// @throws UsageError if an optimizer step has ended half-way: discarding gradients does not repair the parameters
  void expect_no_incomplete_step(std::string_view what) const {
    if (writer_ == optimizer_step) refuse_incomplete_parameters(what);
  }
  /// @throws UsageError if a backward pass is incomplete, naming its units
  void expect_whole_gradients(std::string_view what) const {
    if (in_backward()) refuse_incomplete_gradients(what);
  }

 protected:
  using Turns = detail::FixedArray<Program::Turn>;

  /// @param rank      for messages
  /// @param declared  see declared(); must outlive the state
  explicit PassState(int rank, UseOrder const* declared = nullptr)
      : rank_(rank), declared_(declared), accesses_(rank) {}
  ~PassState() = default;

  [[gnu::cold]] void set_program(Program const& program) {
    program_ = &program;
    contents_ = Contents(program);
    set_path(0);
  }
  /// Forgets the program: sealing has failed.
  [[gnu::cold]] void forget_program() noexcept {
    program_ = nullptr;
    contents_ = {};
    turns_ = nullptr;
    turn_ = nullptr;
  }
  /// Whether a backward pass is in progress, or was interrupted by an exception.
  bool in_backward() const { return stage_ == Stage::backward || stage_ == Stage::interrupted; }

  /// Opens a forward use. @return whether it is the first of a pass
  /// @throws UsageError, OrderError if it may not begin now; nothing has changed then
  bool enter_forward(std::size_t use) {
    if (in_backward() || !writer_.empty()) {
      auto const what = formatted("forward of '{}' begins", module_name(use));
      expect_whole_gradients(what);
      expect_whole_parameters(what);
    }
    accesses_.expect_none(UseKind::forward, module_name(use), "begins");
    if (open_) expect_closed(formatted("forward of '{}' begins", module_name(use)));
    bool const starts = stage_ != Stage::forward;
    auto const path = starts ? next_path() : at_.path;
    auto const& turns = starts ? program_->turns(next_forward_kind(), path) : *turns_;
    auto const& turn = turns[starts ? 0 : done_];
    if (turn.use != use) refuse_order(turn, path, UseKind::forward, use);
    if (starts) begin_turns(Stage::forward, turns);
    open(turn);
    return starts;
  }
  /// Opens a backward use, or the recomputation of a use. @return whether it is the first of a pass
  /// @throws UsageError, OrderError if it may not begin now; nothing has changed then
  /// @pre !skips(kind, use)
  bool enter_backward(UseKind kind, std::size_t use) {
    FSDP_EXPECTS(evaluations_ == 0,
                 "rank {}: {} of '{}' was called inside an evaluation; end the evaluation scope first", rank_,
                 name(kind), module_name(use));
    expect_not_swapped("a backward pass begins");
    if (stage_ == Stage::interrupted)
      expect_whole_gradients(formatted("{} of '{}' begins", name(kind), module_name(use)));
    accesses_.expect_none(kind, module_name(use), "begins");
    if (open_) expect_closed(formatted("{} of '{}' begins", name(kind), module_name(use)));
    auto const* turn = next_backward_turn();
    if (turn == nullptr || turn->use != use || kind_of(*turn) != kind) refuse_backward(kind, use);
    bool const starts = stage_ == Stage::forward_done;
    if (starts) begin_turns(Stage::backward, program_->turns(next_backward_kind(), at_.path));
    open(*turn);
    return starts;
  }
  /// Whether backward passes do not come to the use, because no unit at or below it trains; or do not recompute it,
  /// because none at or below its segment's last use does. So it is once the pass is complete. While a pass is in
  /// progress, the use would come out of order.
  bool skips(UseKind kind, std::size_t use) const {
    if (stage_ != Stage::idle || open_ || program_ == nullptr) return false;
    if (program_->turns(PassKind::backward, at_.path).empty()) return false;
    bool const recomputes = kind == UseKind::recompute;
    if (recomputes && declared_ != nullptr && declared_->segment(use) == UseOrder::none) return false;
    auto const end = recomputes ? lowest_index_ : program_->backward_end(at_.path);
    return at_.path == 0 ? use < end : comes_below(use, end);
  }
  /// Begins the flags of a pass whose first use is open. @return whether parameters of earlier passes are dropped first
  bool begin_flags() {
    if (stage_ == Stage::forward) {
      if (at_.path != next_path()) flags_.forget_parameters();
      return flags_.begin_forward();
    }
    if (next_backward_kind() == PassKind::frozen_backward)
      flags_.begin_frozen_backward(next_backward());
    else
      flags_.begin_backward(next_backward());
    return false;
  }
  /// Moves the position to a pass whose flags have begun.
  void begin_position() {
    if (stage_ == Stage::forward) {
      if (auto const path = next_path(); at_.path != path) set_path(path);
      at_.kind = next_forward_kind();
      at_.micro_step = backward_passes_ + 1;
    } else {
      at_.kind = next_backward_kind();
      if (at_.kind == PassKind::backward) at_.micro_step = ++backward_passes_;
    }
    at_.flags = flags_.now();
  }
  /// Moves the position to the open use.
  void move_to_use() { at_.use = turn_->use, at_.index_in_path = turn_->index_in_path; }
  /// Counts optimizer steps of a run.
  void count_step() { ++at_.step; }
  /// Closes the open use. @return whether it was the last of its pass
  bool leave() {
    open_ = false;
    at_.use = RunPosition::no_use;
    if (++done_ < turns_->size()) return false;
    if (stage_ == Stage::forward) return stage_ = Stage::forward_done, true;
    if (at_.kind == PassKind::frozen_backward)
      flags_.end_frozen_backward();
    else
      flags_.end_backward();
    stage_ = Stage::idle;
    return true;
  }
  /// @throws UsageError if a scope that the pass needs has ended inside the open use, or a scope that accesses shards
  /// has begun inside it
  void expect_whole_use() const {
    if (!cut_.empty()) refuse_cut_use();
    accesses_.expect_none(open_kind(), module_name(turn_->use), "ends");
  }
  /// Abandons the pass in progress: the next use starts a new forward pass.
  void forget_pass() noexcept {
    stage_ = Stage::idle;
    open_ = false;
    cut_ = {};
    at_.use = RunPosition::no_use;
    flags_.forget_parameters();
  }
  /// As forget_pass(), after an exception: a backward pass with gradients has left them incomplete.
  void interrupt_pass() noexcept {
    bool const writes_gradients = stage_ == Stage::interrupted || (stage_ == Stage::backward && !freezes_parameters());
    forget_pass();
    if (writes_gradients) stage_ = Stage::interrupted;
  }
  /// Sets the scopes of backward passes that begin, for a run without scopes.
  void set_scopes(BackwardFlags flags, bool frozen) {
    scopes_ = {!flags.gradient_sync, !flags.replica_sync, !flags.reshard, frozen};
  }
  void forget_gradients() { flags_.forget_gradients(); }
  /// Counts scopes of evaluations: one begins (1) or ends (-1).
  void add_evaluation(int by) { evaluations_ += by; }
  /// The end of the open use is to fail. @param why  a literal, for the message
  void cut_use(std::string_view why) { cut_ = why; }
  bool is_open() const { return open_; }
  bool in_forward() const { return stage_ == Stage::forward; }
  /// Of the open use.
  Program::Turn const& turn() const { return *turn_; }
  RunPosition const& at() const { return at_; }
  Contents& contents_to_change() { return contents_; }

 private:
  static constexpr std::string_view optimizer_step = "an optimizer step";

  static UseKind kind_of(Program::Turn const& turn) {
    return turn.recomputes() ? UseKind::recompute : UseKind::backward;
  }
  UseKind open_kind() const { return stage_ == Stage::forward ? UseKind::forward : kind_of(*turn_); }
  /// @param use  in the declared order
  std::string_view module_name(std::size_t use) const {
    if (program_ == nullptr) return declared_->module_name(use);
    return use < program_->modules.size() ? std::string_view(program_->modules[use]) : std::string_view();
  }
  std::uint32_t next_path() const { return followed_ == nullptr ? 0 : static_cast<std::uint32_t>(followed_->path); }
  PassKind next_forward_kind() const { return evaluations_ > 0 ? PassKind::evaluation : PassKind::forward; }
  PassKind next_backward_kind() const {
    return scopes_[static_cast<std::size_t>(BackwardChange::frozen_parameters)] > 0 ? PassKind::frozen_backward
                                                                                    : PassKind::backward;
  }
  /// nullptr: no backward use may come next.
  Program::Turn const* next_backward_turn() const {
    if (stage_ == Stage::backward) return &(*turns_)[done_];
    if (stage_ != Stage::forward_done) return nullptr;
    auto const& turns = program_->turns(next_backward_kind(), at_.path);
    return turns.empty() ? nullptr : &turns[0];
  }
  void begin_turns(Stage stage, Turns const& turns) {
    stage_ = stage;
    turns_ = &turns;
    done_ = 0;
  }
  void open(Program::Turn const& turn) {
    open_ = true;
    turn_ = &turn;
  }
  /// Changes the path of passes.
  void set_path(std::uint32_t path) {
    at_.path = path;
    lowest_index_ = static_cast<std::uint32_t>(program_->uses(path));
    for (auto const& turn : program_->turns(PassKind::backward, path))
      if (turn.index_in_path < lowest_index_) lowest_index_ = turn.index_in_path;
  }
  /// Whether the path has the use at an index before `end`. Calls come in reverse order: the search goes on from the
  /// index that was found last.
  bool comes_below(std::size_t use, std::size_t end) const {
    auto const& turns = program_->turns(PassKind::forward, at_.path);
    for (std::size_t step = 0; step < end; ++step) {
      found_ = (found_ == 0 || found_ > end ? end : found_) - 1;
      if (turns[found_].use == use) return true;
    }
    return false;
  }

  [[noreturn, gnu::cold]] void refuse_order(Program::Turn const& next, std::size_t path, UseKind kind,
                                            std::size_t use) const {
    auto const& path_name = program_->path_name(path);
    auto const which = path_name.empty() ? std::string("in which they were added")
                                         : formatted("of path '{}', which the pass follows", path_name);
    fail<OrderError>("rank {}: modules must run in the order {}: expected {} of '{}', got {} of '{}'", rank_, which,
                     name(kind == UseKind::forward ? kind : kind_of(next)), module_name(next.use), name(kind),
                     module_name(use));
  }
  [[noreturn, gnu::cold]] void refuse_backward(UseKind kind, std::size_t use) const {
    if (program_ != nullptr && stage_ != Stage::backward && program_->turns(PassKind::backward, at_.path).empty() &&
        next_backward_kind() == PassKind::backward)
      fail<UsageError>("rank {}: {} of '{}': nothing trains in path '{}', so its passes have no backward", rank_,
                       name(kind), module_name(use), program_->path_name(at_.path));
    if (stage_ == Stage::idle)  // each text with four names: compilers then have one function for all
      fail<OrderError>(
          "rank {}: {} of '{}' was called without a {} pass: none has run since the last {}, or an evaluation, an "
          "optimizer step, an import or an exception has discarded it; call forward first",
          rank_, name(kind), module_name(use), name(UseKind::forward), name(UseKind::backward));
    if (stage_ == Stage::forward)
      fail<OrderError>("rank {}: {} of '{}' was called before the forward pass was complete; expected {} of '{}' next",
                       rank_, name(kind), module_name(use), name(UseKind::forward), module_name((*turns_)[done_].use));
    refuse_order(*next_backward_turn(), at_.path, kind, use);
  }
  /// A scope that the pass needs has ended in the open use.
  [[noreturn, gnu::cold]] void refuse_cut_use() const {
    fail<UsageError>(
        "rank {}: {} of '{}' ends, but {} inside it, so the pass was dropped. End a use before the scope that it began "
        "in",
        rank_, name(open_kind()), module_name(turn_->use), cut_);
  }
  /// An optimizer step, an import or a load was interrupted, so only some parameters are new.
  [[noreturn, gnu::cold]] void refuse_incomplete_parameters(std::string_view what) const {
    std::string done, missing;
    bool const steps = writer_ == optimizer_step;
    for (std::size_t u = 0; steps && u < program_->units.size(); ++u)
      if (stepped_[u]) add_quoted(has_gradient(u) ? missing : done, program_->units[u].name);
    auto const units = !steps ? std::string()
                              : formatted(": units updated: {}; not updated: {}", done.empty() ? "none" : done,
                                          missing.empty() ? "none" : missing);
    fail<UsageError>("rank {}: {}, but {} is incomplete{}. Load a checkpoint, or import all parameters, on all ranks",
                     rank_, what, writer_, units);
  }
  [[noreturn, gnu::cold]] void refuse_incomplete_gradients(std::string_view what) const {
    expect_closed(what);
    if (freezes_parameters())
      fail<UsageError>(
          "rank {}: {}, but a backward pass inside frozen_parameters() is incomplete. Complete it, or call "
          "discard_gradients()",
          rank_, what);
    auto const& uses = program_->turns(PassKind::forward, at_.path);
    auto lowest = uses.size();  // index of the last use that backward has completed
    for (std::size_t turn = 0; turn < done_; ++turn)
      if (!(*turns_)[turn].recomputes()) lowest = (*turns_)[turn].index_in_path;
    std::vector<std::size_t> first(program_->units.size(), uses.size());  // index of each unit's first use
    for (auto index = uses.size(); index-- > 0;) first[uses[index].unit] = index;
    std::string done, missing;
    for (auto index = uses.size(); index-- > 0;) {
      if (first[uses[index].unit] != index) continue;
      for (std::uint32_t u = 0; u < program_->units.size(); ++u) {
        auto const& unit = program_->units[u];
        if ((unit.first == Unit::none ? u : unit.first) == uses[index].unit && !unit.frozen)
          add_quoted(index >= lowest ? done : missing, unit.name);
      }
    }
    bool const interrupted = stage_ == Stage::interrupted;
    fail<UsageError>(
        "rank {}: {}, but {}: units that have their gradients: {}; units without: {}. {}discard_gradients()", rank_,
        what, interrupted ? "an exception has interrupted a backward pass" : "a backward pass is incomplete",
        done.empty() ? "none" : done, missing.empty() ? "none" : missing,
        interrupted ? "Call " : "Complete it, or call ");
  }
  static void add_quoted(std::string& list, std::string_view name) {
    list += formatted("{}'{}'", list.empty() ? "" : ", ", name);
  }

  int rank_;
  UseOrder const* declared_;
  OpenAccesses accesses_;
  Program const* program_ = nullptr;
  Contents contents_;
  PassFlags flags_;
  Stage stage_ = Stage::idle;
  Turns const* turns_ = nullptr;         ///< of the pass in progress, or of the last one
  std::size_t done_ = 0;                 ///< turns that are complete
  bool open_ = false;                    ///< a use is open
  Program::Turn const* turn_ = nullptr;  ///< of the open use
  std::string_view cut_;                 ///< why the end of the open use drops the pass; empty: it does not
  int evaluations_ = 0;                  ///< scopes that are open
  RunPosition at_;
  std::uint32_t lowest_index_ = RunPosition::no_use;  ///< in the path: lowest one in a backward pass
  mutable std::size_t found_ = 0;                     ///< an index in the path: see comes_below
  std::array<int, backward_changes> scopes_{};        ///< by BackwardChange: scopes that are open
  FollowedPath* followed_ = nullptr;                  ///< nullptr: passes that begin follow the declared order
  std::uint32_t backward_passes_ = 0;
  std::string_view writer_;           ///< of parameters that are incomplete: optimizer_step, "an import"; empty: none
  std::size_t to_update_ = 0;         ///< units that the step under way has not updated
  detail::FixedArray<bool> stepped_;  ///< by unit: whether the last step updated it; empty: there was none
  bool swapped_ = false;              ///< averages are in the place of parameters
};

/// Runs the operations of a program as its uses begin and end.
///
/// `begin_pass(RunPosition const&)`: a pass begins, with its first use.
///
/// `perform(Operation const&, RunPosition const&, Contents const&)`: an operation. The contents are those before it.
///
/// `begin_compute(Turn const&)`: the module's kernels follow.
///
/// `computed(Operation const&, RunPosition const&, Contents const&)`: the kernels are enqueued. One call for each unit
/// that they access.
///
/// `interrupted(Turn const&)`: an exception has ended the kernels.
///
/// `end_pass(RunPosition const&)`: the last use of the pass has ended.
/// @tparam Performer  has the members above
template <class Performer>
class Passes : public PassState {
 public:
  explicit Passes(Performer& performer, int rank = 0, UseOrder const* declared = nullptr)
      : PassState(rank, declared), performer_(&performer) {}

  /// Gives it the program, which must outlive it, and zeroes all gradient slots.
  [[gnu::cold]] void prepare(Program const& program) {
    set_program(program);
    for (std::uint32_t slot = 0; slot < program.gradient_slots.size(); ++slot)
      run(zeroing(program, slot, StreamKind::reduce));
  }
  /// Undoes prepare().
  [[gnu::cold]] void release() noexcept { forget_program(); }

  /// Begins a use: performs the operations before its kernels.
  /// @return its turn; nullptr: backward passes do not come to the use
  /// @throws UsageError, OrderError if it may not begin now; nothing has changed then. Whatever the performer throws:
  /// the pass has ended then, see interrupt()
  Program::Turn const* begin_use(UseKind kind, std::size_t use) {
    if (kind != UseKind::forward && skips(kind, use)) return nullptr;
    bool const starts = kind == UseKind::forward ? enter_forward(use) : enter_backward(kind, use);
    try {
      if (starts) begin_pass();
      move_to_use();
      perform(turn().before);
      performer_->begin_compute(turn());
      computing_ = true;
    } catch (...) {
      interrupt();
      throw;
    }
    return &turn();
  }
  /// Ends the open use, which there is: performs the operations after its kernels.
  /// @throws UsageError if a scope that it needs has ended in it; whatever the performer throws. The pass has ended
  /// then
  void end_use() {
    try {
      computing_ = false;
      computed(turn().compute);
      for (auto const& operation : turn().beside) computed(operation);
      expect_whole_use();
      perform(turn().after);
      if (leave()) performer_->end_pass(at());
    } catch (...) {
      interrupt();
      throw;
    }
  }
  /// Performs an operation, if contents let it.
  void run(Operation const& operation) {
    if (!contents().runs(operation)) return;
    performer_->perform(operation, at(), contents());
    contents_to_change().apply(operation);
  }

  /// Ends the pass under way after an exception: every unit is dropped. Gradients of a backward pass are then
  /// incomplete: all but discard() is refused.
  [[gnu::cold, gnu::noinline]] void interrupt() noexcept {
    interrupt_pass();
    drop_parameters();
  }
  /// Drops a forward pass in progress: every unit is dropped, and the next use starts a new pass.
  /// @throws UsageError inside a use, or in the middle of a backward pass
  /// @param what  the refused action, for the message
  void abandon(std::string_view what) {
    expect_whole_gradients(what);
    expect_closed(what);
    drop_pass();
  }
  /// Drops the pass in progress, because a scope that it needs ends. If a use is open, its end drops the pass, and
  /// throws.
  /// @param why  a literal, for the message
  void cut(std::string_view why) noexcept {
    if (!is_open()) return interrupt();
    cut_use(why);
  }
  /// Forgets all gradients, and a pass that is incomplete. Gradients of earlier passes may be discarded inside a
  /// forward use, and between a forward pass and its backward: these go on.
  void discard() {
    if (in_backward()) expect_closed("gradients are discarded");
    bool const drops = in_backward() || (in_forward() && !is_open());
    contents_to_change().discard_gradients([this](Operation const& operation) { run(operation); });
    forget_gradients();
    if (drops) drop_pass();
  }
  /// Begins an evaluation. Forward keeps nothing for backward. Evaluations nest. A forward pass in progress is dropped.
  void begin_evaluation() {
    expect_whole_parameters("an evaluation begins");
    abandon("an evaluation begins");
    add_evaluation(1);
  }
  void end_evaluation() noexcept {
    add_evaluation(-1);
    cut("an evaluation ended");
  }
  /// With WithoutGradient::zeros, gives units without a gradient one of zeroes, if some unit has one. @note Stream: on
  /// compute
  void complete_gradients() {
    bool some = false;
    for (auto const& operation : program().absent) some = some || has_gradient(operation.unit);
    for (auto const& operation : program().absent)
      if (some) run(operation);
  }

 private:
  void begin_pass() {
    if (begin_flags()) drop_parameters();
    begin_position();
    performer_->begin_pass(at());
  }
  template <class Operations>
  void perform(Operations const& operations) {
    for (auto const& operation : operations)
      if (operation.runs(at().flags)) run(operation);
  }
  void computed(Operation const& operation) {
    performer_->computed(operation, at(), contents());
    contents_to_change().apply(operation);
  }
  void drop_pass() {
    forget_pass();
    drop_parameters();
  }
  /// Kernels that were enqueued for a use go on.
  [[gnu::noinline]] void drop_parameters() {
    if (std::exchange(computing_, false)) performer_->interrupted(turn());
    contents_to_change().drop_parameters([this](Operation const& operation) { run(operation); });
  }

  Performer* performer_;
  bool computing_ = false;  ///< between begin_compute and computed
};

/// An operation of a run, with `Mode::sum` resolved to `write` or `add`.
struct Executed {
  Operation operation;
  RunPosition at;
};
/// @param contents  before the operation
inline Executed executed(Operation const& operation, RunPosition const& at, Contents const& contents) {
  Executed result{operation, at};
  for (auto& access : result.operation.accesses())
    if (access.mode == Mode::sum) access.mode = contents.is_first_term(operation) ? Mode::write : Mode::add;
  return result;
}

/// A visitor of Run that appends to `list`, which must outlive it.
inline auto record_into(std::vector<Executed>& list) {
  return [&list](Operation const& operation, RunPosition const& at, Contents const& contents) {
    list.push_back(executed(operation, at, contents));
  };
}

/// A performer that shows each operation to a visitor.
class Visiting {
 public:
  void begin_pass(RunPosition const&) {}
  /// A visitor that throws is not called again.
  void perform(Operation const& operation, RunPosition const& at, Contents const& contents) {
    if (std::exchange(stopped_, true)) return;
    visit(operation, at, contents);
    stopped_ = false;
  }
  void begin_compute(Program::Turn const&) {}
  void computed(Operation const& operation, RunPosition const& at, Contents const& contents) {
    perform(operation, at, contents);
  }
  void interrupted(Program::Turn const&) {}
  void end_pass(RunPosition const&) {}

 protected:
  Visiting() = default;
  Visiting(Visiting const&) = default;
  ~Visiting() = default;

 private:
  /// Called for each operation of the run. @param contents  before it
  virtual void visit(Operation const& operation, RunPosition const& at, Contents const& contents) = 0;

  bool stopped_ = false;
};

/// The operations of a run, in the order in which an engine enqueues them. All ranks enqueue the same.
class BasicRun : public Visiting, public Passes<Visiting> {
 public:
  /// Zeroes all gradient slots, as an engine does after it has placed the buffers.
  [[gnu::cold]] void prepare() { Passes::prepare(program()); }
  /// Passes that begin now follow the path, until the next call: see [Note: Paths].
  void follow(std::size_t path) { path_.path = path; }
  /// @param index  of the use in the path that is followed
  [[gnu::cold]] void forward(std::size_t index) {
    forward(program().turns(PassKind::forward, in_forward() ? at().path : path_.path)[index]);
  }
  /// @param flags       of the pass; looked at when it begins
  /// @param recomputes  the use is recomputed
  [[gnu::cold]] void backward(std::size_t index, BackwardFlags flags, bool recomputes = false) {
    backward(program().turn(PassKind::backward, index, recomputes, at().path), flags);
  }
  /// Runs a backward use of a pass without gradients. @param reshard  false: parameters stay unsharded
  [[gnu::cold]] void frozen_backward(std::size_t index, bool reshard, bool recomputes = false) {
    backward(program().turn(PassKind::frozen_backward, index, recomputes, at().path), {.reshard = reshard}, true);
  }
  /// Measures the gradient norm.
  [[gnu::cold]] void norm() {
    complete_gradients();
    for (auto const& operation : program().norms)
      if (operation.size > 0 && has_gradient(operation.unit)) run(operation);
  }
  /// Updates all units that have a gradient.
  [[gnu::cold]] void update() {
    abandon("an optimizer step begins");
    complete_gradients();
    begin_updates();
    program().for_each_update(
        [this](Operation const& operation) {
          if (operation.primitive != Primitive::update) return run(operation);
          Visiting::perform(operation, at(), contents());
          note_update(operation);
        },
        [this](std::size_t unit) { return has_gradient(unit); });
    count_step();
  }

  /// Runs a forward and a backward pass.
  [[gnu::cold]] void micro_step(BackwardFlags flags = {}) {
    forward();
    for (auto const& turn : program().turns(PassKind::backward, path_.path)) backward(turn, flags);
  }
  /// Runs a forward pass, and a backward pass that writes no gradients of parameters; nothing if the program has no
  /// such pass.
  [[gnu::cold]] void frozen_micro_step(bool reshard = true) {
    if (program().turns(PassKind::frozen_backward, path_.path).empty()) return;
    forward();
    for (auto const& turn : program().turns(PassKind::frozen_backward, path_.path))
      backward(turn, {.reshard = reshard}, true);
  }
  [[gnu::cold]] void evaluation() {
    begin_evaluation();
    forward();
    abandon("an evaluation ends");  // here, the visitor may throw
    end_evaluation();
  }
  /// Number of uses of a forward pass that begins now.
  std::size_t uses() const { return program().uses(path_.path); }

 protected:
  /// @param program  must outlive the run
  [[gnu::cold]] explicit BasicRun(Program const& program) : Passes(static_cast<Visiting&>(*this)) {
    set_program(program);
    followed() = &path_;
  }
  ~BasicRun() = default;

 private:
  [[gnu::cold]] void forward() {
    for (auto const& turn : program().turns(PassKind::forward, path_.path)) forward(turn);
  }
  [[gnu::cold]] void forward(Program::Turn const& turn) {
    begin_use(UseKind::forward, turn.use);
    end_use();
  }
  [[gnu::cold]] void backward(Program::Turn const& turn, BackwardFlags flags, bool frozen = false) {
    set_scopes(flags, frozen);
    if (begin_use(turn.recomputes() ? UseKind::recompute : UseKind::backward, turn.use) != nullptr) end_use();
  }

  FollowedPath path_;
};

/// Calls a function for each operation of a run.
/// @tparam Visit  called as visit(Operation const&, RunPosition const&, Contents const&), as Visiting::visit
template <class Visit>
class Run final : public BasicRun {
 public:
  Run(Program const& program, Visit visit) : BasicRun(program), visit_(std::move(visit)) {}

 private:
  void visit(Operation const& operation, RunPosition const& at, Contents const& contents) override {
    visit_(operation, at, contents);
  }

  Visit visit_;
};

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE::step
