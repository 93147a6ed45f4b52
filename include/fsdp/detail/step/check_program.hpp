// SPDX-License-Identifier: Apache-2.0
// Checks a compiled program: tracks the symbolic content of each cell while operations run, and finds operations
// whose input has the wrong content.
#pragma once

#include <algorithm>
#include <compare>
#include <cstddef>
#include <cstdint>
#include <map>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "fsdp/detail/base/format.hpp"
#include "fsdp/detail/step/buffers.hpp"
#include "fsdp/detail/step/input.hpp"
#include "fsdp/detail/step/operation.hpp"
#include "fsdp/detail/step/passes.hpp"
#include "fsdp/detail/step/program.hpp"
#include "fsdp/detail/step/program_text.hpp"
#include "fsdp/error.hpp"
#include "fsdp/version.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE::step {

/// Number of terms that a backward pass adds to the gradients of a unit. It depends on the pass's path.
class BackwardUses {
 public:
  [[gnu::cold]] explicit BackwardUses(Program const& program) : units_(program.units.size()) {
    for (std::size_t path = 0; path < program.paths(); ++path) {
      places_.resize(places_.size() + units_);
      for (auto const& turn : program.turns(PassKind::backward, path)) {
        if (turn.recomputes()) continue;
        of(path, turn.unit).insert(turn.index_in_path);
        for (auto const& operation : turn.beside) of(path, operation.unit).insert(turn.index_in_path);
      }
    }
  }
  /// Records the path of a micro-step.
  void begin(std::uint32_t micro_step, std::uint32_t path) { paths_[micro_step] = path; }
  /// Number of uses of the unit in the backward pass of a micro-step that has begun.
  std::size_t count(std::uint32_t micro_step, std::uint32_t unit) const {
    auto const path = paths_.find(micro_step);
    return path == paths_.end() ? 0 : places_[path->second * units_ + unit].size();
  }

 private:
  std::set<std::uint32_t>& of(std::size_t path, std::uint32_t unit) { return places_[path * units_ + unit]; }

  std::size_t units_;
  std::vector<std::set<std::uint32_t>> places_;   ///< by path and unit: places of its uses
  std::map<std::uint32_t, std::uint32_t> paths_;  ///< path of each micro-step
};

/// A term of a sum of gradients: the contribution of one use in one micro-step.
struct Term {
  std::uint32_t micro_step = 0;
  std::uint32_t use = 0;  ///< its index in the path
  friend auto operator<=>(Term const&, Term const&) = default;
};
/// The share of a term in a sum.
struct Share {
  int times = 1;  ///< how often it was added
  int ranks = 1;  ///< over which it is summed
  friend auto operator<=>(Share const&, Share const&) = default;
};

/// The content of a cell.
struct Symbol {
  enum class Kind : unsigned char { nothing, zeroes, parameters, gradients };

  Kind kind = Kind::nothing;
  bool used_up = false;  ///< nothing may read it any more
  bool padded = false;   ///< elements that belong to no tensor may be other than zero
  bool hooked = false;   ///< for gradients: functions of the caller have seen this sum
  std::uint32_t unit = 0;
  std::uint32_t step = 0;         ///< for parameters: number of updates before them
  std::map<Term, Share> terms{};  ///< of gradients

  bool holds(Kind what) const { return kind == what && !used_up; }
  /// Adds to a sum of gradients.
  void count(Term term, Share share) {
    auto const [entry, is_new] = terms.try_emplace(term, share);
    if (!is_new) entry->second.times += share.times, entry->second.ranks = share.ranks;
    hooked = false;
  }
  void merge(Symbol const& more) {
    for (auto const& [term, share] : more.terms) count(term, share);
    padded = padded || more.padded;
  }
};

class SymbolTexts {
 public:
  [[gnu::cold]] explicit SymbolTexts(Program const& program) : program_(&program), uses_(program) {}

  std::string text(Symbol const& content) const {
    std::string_view const age = content.used_up ? "used-up " : "";
    switch (content.kind) {
      case Symbol::Kind::nothing: return "nothing";
      case Symbol::Kind::zeroes: return "zeroes";
      case Symbol::Kind::parameters:
        return formatted("{}parameters of '{}' of step {}", age, program_->units[content.unit].name, content.step);
      case Symbol::Kind::gradients: break;
    }
    auto words = formatted("{}gradients of '{}'", age, program_->units[content.unit].name);
    words += content.terms.empty() ? " of no micro-step" : ": " + text(content.unit, content.terms);
    if (content.padded) words += ", padding not zeroed";
    if (content.hooked) words += ", hooked";
    return words;
  }

 protected:
  /// "micro-steps 1-2 over all ranks, micro-step 3 of this rank"
  std::string text(std::uint32_t unit, std::map<Term, Share> const& terms) const {
    std::map<Share, std::map<std::uint32_t, std::vector<std::uint32_t>>> alike;  // uses by micro-step
    for (auto const& [term, share] : terms) alike[share][term.micro_step].push_back(term.use);
    std::string words;
    for (auto const& [share, micro_steps] : alike) {
      for (auto next = micro_steps.begin(); next != micro_steps.end();) {
        auto const [first, uses] = *next;
        auto last = first;
        if (!words.empty()) words += ", ";
        if (uses.size() == uses_.count(first, unit)) {
          while (++next != micro_steps.end() && next->first == last + 1 && next->second.size() == uses.size()) ++last;
          words += first == last ? formatted("micro-step {}", first) : formatted("micro-steps {}-{}", first, last);
        } else {
          words += formatted("use {} of micro-step {}", listed(uses), first);
          ++next;
        }
        words += scope(unit, share.ranks);
        if (share.times > 1) words += formatted(" {} times", share.times);
      }
    }
    return words;
  }
  std::string_view scope(std::uint32_t unit, int ranks) const {
    auto const& planned = program_->units[unit];
    if (ranks == planned.world()) return " over all ranks";
    return ranks == 1 ? " of this rank" : " over the group";
  }

  Program const* program_;
  BackwardUses uses_;
};

/// Runs operations, the same on all ranks. An operation whose input has the wrong content adds a text to problems().
class Symbols : SymbolTexts {
 public:
  /// @param padded  by unit: some elements belong to no tensor
  [[gnu::cold]] Symbols(Program const& program, std::vector<bool> padded)
      : SymbolTexts(program),
        buffers_(&program.buffers),
        padded_(std::move(padded)),
        cells_(program.buffers),
        due_(program.units.size()),
        updates_(program.units.size(), 0) {
    for (std::uint32_t u = 0; u < program.units.size(); ++u)
      for (auto const pool : {Pool::master, Pool::offloaded})
        if (!program.units[u].empty()) cells_[program.buffers.of_unit(pool, u)][0] = parameters(u);
  }

  using SymbolTexts::text;
  std::vector<std::string> const& problems() const { return problems_; }
  /// Expects that an optimizer step has updated every unit that has gradients.
  [[gnu::cold]] void expect_updated() {
    for (std::uint32_t u = 0; u < due_.size() && problems_.size() < most_; ++u)
      if (program_->units[u].trains() && !due_[u].empty())
        problems_.push_back(formatted("step {}: expected an update of '{}', found none: its gradients are incomplete",
                                      at_.step, program_->units[u].name));
  }
  [[gnu::cold]] void run(Executed const& executed) {
    if (problems_.size() >= most_) return;
    auto const& operation = executed.operation;
    auto const accesses = operation.accesses();
    now_ = &executed.operation;
    at_ = executed.at;
    switch (operation.primitive) {
      case Primitive::open:
        if (Buffers::has_slots(accesses[0].cells.pool)) open(accesses[0].cells);
        return;
      case Primitive::close:
        if (Buffers::has_slots(accesses[0].cells.pool)) use_up(accesses[0].cells);
        return;
      case Primitive::discard:
        for (auto& due : due_) due.clear();
        return;
      case Primitive::zero: return fill(accesses[0].cells, {.kind = Symbol::Kind::zeroes});
      case Primitive::zero_padding:
        for (auto& cell : cells_[accesses[0].cells]) cell.padded = false;
        return;
      case Primitive::cast: return move_parameters(accesses, false);
      case Primitive::all_gather: return move_parameters(accesses, false);
      case Primitive::copy: return move_parameters(accesses, true);
      case Primitive::forward:
      case Primitive::recompute:
      case Primitive::backward: return compute(accesses);
      case Primitive::accumulate: return operation.bucket == Operation::none ? accumulate(accesses) : unpack(accesses);
      case Primitive::add: return add(accesses);
      case Primitive::round: return operation.bucket == Operation::none ? round(accesses) : pack(accesses);
      case Primitive::reduce_scatter: return reduce_scatter(accesses);
      case Primitive::all_reduce: return all_reduce(accesses);
      case Primitive::hook: return hook(accesses[0].cells);
      case Primitive::norm: return expect_due(accesses[0].cells, program_->units[operation.unit].hooked);
      case Primitive::update: return update(accesses);
      case Primitive::fetch:
      case Primitive::store: return stage(accesses);
      case Primitive::count_: return;
    }
  }

 private:
  static constexpr std::size_t most_ = 20;

  Symbol parameters(std::uint32_t unit) const {
    return {.kind = Symbol::Kind::parameters, .unit = unit, .step = updates_[unit]};
  }
  Symbol gradients(std::uint32_t unit, bool padded) const {
    return {.kind = Symbol::Kind::gradients, .padded = padded, .unit = unit};
  }
  void fill(Cells cells, Symbol const& content) {
    for (auto& cell : cells_[cells]) cell = content;
  }
  /// The unit whose gradients are in the cell.
  std::uint32_t unit_of(Cells cells, std::uint32_t index) const {
    return cells.pool == Pool::gradient ? buffers_->unit_of_gradient(cells.first + index) : now_->unit;
  }

  std::string where() const {
    auto const& at = at_;
    std::string words = formatted("step {}", at.step);
    if (at.use != RunPosition::no_use)
      words += formatted(", micro-step {}, {} of use {} ('{}')", at.micro_step, name(at.kind), at.use,
                         program_->modules[at.use]);
    words += formatted(", {}", name(now_->primitive));
    if (now_->unit != Operation::none) words += formatted(" of '{}'", program_->units[now_->unit].name);
    return words;
  }
  void complain(Cells cells, std::uint32_t index, std::string const& expected, Symbol const& found) {
    auto const cell = Cells{cells.pool, cells.first + index, 1};
    problems_.push_back(
        formatted("{}: {}: expected {}, found {}", where(), to_text(*program_, cell), expected, text(found)));
  }
  /// Calls `check(unit, Symbol)` for every cell. It returns a text of the expected content, or "" if the content is
  /// right.
  template <class Check>
  void expect(Cells cells, Check const& check) {
    auto const contents = cells_[cells];
    for (std::uint32_t i = 0; i < contents.size(); ++i)
      if (auto const expected = check(unit_of(cells, i), contents[i]); !expected.empty())
        return complain(cells, i, expected, contents[i]);
  }

  void open(Cells cells) {
    expect(cells, [&](std::uint32_t, Symbol const& content) -> std::string {
      bool const in_use = content.holds(Symbol::Kind::parameters) || content.holds(Symbol::Kind::gradients);
      return in_use ? "a buffer that is free" : "";
    });
    for (auto& cell : cells_[cells]) cell.padded = cell.kind != Symbol::Kind::zeroes;
  }
  /// Uses a content up: nothing may read it any more, but zeroes stay zeroes.
  void use_up(Cells cells) {
    for (auto& cell : cells_[cells]) cell.used_up = cell.kind != Symbol::Kind::zeroes;
  }

  void expect_parameters(Cells cells, bool of_this_step) {
    expect(cells, [&](std::uint32_t unit, Symbol const& content) -> std::string {
      bool const right = content.holds(Symbol::Kind::parameters) && content.unit == unit &&
                         (!of_this_step || content.step == updates_[unit]);
      return right ? "" : text(parameters(unit));
    });
  }
  void move_parameters(std::span<Access const> accesses, bool of_this_step) {
    expect_parameters(accesses[0].cells, of_this_step);
    fill(accesses[1].cells, Symbol(cells_[accesses[0].cells][0]));
  }
  void compute(std::span<Access const> accesses) {
    if (!accesses.empty()) expect_parameters(accesses[0].cells, true);
    if (accesses.size() < 2) return;
    auto const unit = now_->unit;
    Term const term{at_.micro_step, at_.index_in_path};
    uses_.begin(at_.micro_step, at_.path);
    due_[unit].insert(term);
    bool const first = accesses[1].mode == Mode::write;
    if (!first)
      expect(accesses[1].cells, [&](std::uint32_t, Symbol const& content) -> std::string {
        bool const right =
            content.kind == Symbol::Kind::zeroes || (content.holds(Symbol::Kind::gradients) && content.unit == unit);
        return right ? "" : formatted("zeroes or a sum of gradients of '{}'", program_->units[unit].name);
      });
    for (auto& cell : cells_[accesses[1].cells]) {
      if (first || !cell.holds(Symbol::Kind::gradients)) cell = gradients(unit, cell.padded);
      cell.count(term, {});
    }
  }

  /// Expects the sum of whole micro-steps, for a reader.
  /// @param ranks   over which terms are summed; 0: over one or all
  /// @param latest  the micro-step under way must be in it
  void expect_sum(Cells cells, int ranks, bool latest = true) {
    expect(cells, [&](std::uint32_t unit, Symbol const& content) -> std::string {
      auto const& planned = program_->units[unit];
      bool right = content.holds(Symbol::Kind::gradients) && content.unit == unit && is_clean(unit, content);
      std::map<std::uint32_t, std::size_t> uses;  // by micro-step
      for (auto const& [term, share] : content.terms) {
        right = right && share.times == 1;
        right = right && (ranks != 0 ? share.ranks == ranks : share.ranks == 1 || share.ranks == planned.world());
        ++uses[term.micro_step];
      }
      for (auto const& [micro_step, found] : uses) right = right && found == uses_.count(micro_step, unit);
      if (latest) right = right && uses.count(at_.micro_step) == 1;
      if (right) return {};
      auto words = formatted("gradients of '{}' of whole micro-steps", planned.name);
      if (latest) words += formatted(", {} among them", at_.micro_step);
      return words + std::string(ranks == 0 ? " of this rank, or over all ranks" : scope(unit, ranks));
    });
  }
  bool is_clean(std::uint32_t unit, Symbol const& content) const { return !content.padded || !padded_[unit]; }
  int world_of(std::uint32_t unit) const { return program_->units[unit].world(); }

  void accumulate(std::span<Access const> accesses) {
    auto const& planned = program_->units[now_->unit];
    auto const pool = accesses[1].cells.pool;
    auto const ranks = pool == Pool::gradient || pool == Pool::staged_gradient ? world_of(now_->unit)
                       : pool == Pool::partial                                 ? planned.shard_ranks
                                                                               : 1;
    expect_sum(accesses[0].cells, ranks);
    auto const from = Symbol(cells_[accesses[0].cells][0]);
    use_up(accesses[0].cells);
    if (accesses[1].mode == Mode::write) return fill(accesses[1].cells, from);
    if (cells_[accesses[1].cells][0].kind == Symbol::Kind::zeroes) return fill(accesses[1].cells, from);
    expect_sum(accesses[1].cells, ranks, false);
    for (auto& cell : cells_[accesses[1].cells]) cell.merge(from);
  }
  /// Adds the accumulator, which is used up.
  void add(std::span<Access const> accesses) {
    for (auto const& access : accesses) expect_sum(access.cells, 1, access.mode == Mode::add);
    auto& from = cells_[accesses[0].cells][0];
    for (auto& cell : cells_[accesses[1].cells]) cell.merge(from);
    from.used_up = true;
  }
  void round(std::span<Access const> accesses) {
    expect_sum(accesses[0].cells, 1);
    fill(accesses[1].cells, Symbol(cells_[accesses[0].cells][0]));
    use_up(accesses[0].cells);
  }
  void reduce_scatter(std::span<Access const> accesses) {
    for (auto const& access : accesses) expect_sum(access.cells, 1);
    for (auto& cell : cells_[accesses[0].cells])
      for (auto& [term, share] : cell.terms) share.ranks *= now_->ranks;
    use_up(accesses[1].cells);
  }
  void all_reduce(std::span<Access const> accesses) {
    auto const cells = accesses[0].cells;
    if (now_->bucket != Operation::none && cells.pool == Pool::wire) {
      if (bucket_of_wire_ != now_->bucket) complain(cells, 0, bucket_text(), cells_[cells][0]);
      for (auto& cell : packed_) average(cell);
      return;
    }
    if (now_->mean) {
      expect_sum(cells, 0);
      for (auto& cell : cells_[cells]) average(cell);
      return;
    }
    expect_sum(cells, program_->units[now_->unit].shard_ranks);
    for (auto& cell : cells_[cells])
      for (auto& [term, share] : cell.terms) share.ranks *= now_->ranks;
  }
  /// Averages a content over ranks. Terms that are equal on all ranks already stay as they are.
  void average(Symbol& content) const {
    for (auto& [term, share] : content.terms) share.ranks = std::max(share.ranks, now_->ranks);
    content.hooked = false;
  }

  // Name of a bucket that is rounded.
  std::string bucket_text() const { return formatted("gradients of bucket {}", now_->bucket); }
  void pack(std::span<Access const> accesses) {
    expect_sum(accesses[0].cells, 0);
    auto const cells = cells_[accesses[0].cells];
    packed_.assign(cells.begin(), cells.end());
    bucket_of_wire_ = now_->bucket;
    fill(accesses[1].cells, gradients(now_->unit, false));
  }
  void unpack(std::span<Access const> accesses) {
    auto const cells = cells_[accesses[1].cells];
    if (bucket_of_wire_ != now_->bucket || !cells_[accesses[0].cells][0].holds(Symbol::Kind::gradients))
      return complain(accesses[0].cells, 0, bucket_text(), cells_[accesses[0].cells][0]);
    for (auto const& content : packed_)
      for (auto const& [term, share] : content.terms)
        if (share.ranks != world_of(content.unit))
          return complain(accesses[1].cells, 0, bucket_text() + " over all ranks", content);
    std::copy(packed_.begin(), packed_.end(), cells.begin());
    use_up(accesses[0].cells);
  }

  /// Expects that gradient shards hold all terms since the last update, each once, over all ranks.
  /// @param hooked  whether functions of the caller have seen this sum
  void expect_due(Cells cells, bool hooked) {
    expect(cells, [&](std::uint32_t unit, Symbol const& content) -> std::string {
      auto due = gradients(unit, false);
      due.hooked = hooked;
      for (auto const& term : due_[unit]) due.terms[term] = {1, world_of(unit)};
      bool const right = content.holds(Symbol::Kind::gradients) && content.unit == unit && content.terms == due.terms &&
                         content.hooked == hooked && is_clean(unit, content);
      bool const absent =
          content.kind == Symbol::Kind::zeroes && due_[unit].empty() && now_->primitive != Primitive::hook;
      return right || absent ? "" : text(due);
    });
  }
  void hook(Cells cells) {
    expect_due(cells, false);
    for (auto& cell : cells_[cells]) cell.hooked = true;
  }
  void update(std::span<Access const> accesses) {
    auto const unit = now_->unit;
    expect_due(accesses[0].cells, program_->units[unit].hooked);
    expect_parameters(accesses[1].cells, true);
    ++updates_[unit];
    fill(accesses[1].cells, parameters(unit));
    if (accesses[2].cells.pool == Pool::staged) {
      expect(accesses[2].cells, [&](std::uint32_t, Symbol const& content) {
        bool const right = content.holds(Symbol::Kind::parameters) && content.unit == unit;
        return right && content.step + 1 == updates_[unit] ? std::string() : "the state before this update";
      });
      fill(accesses[2].cells, parameters(unit));
    }
    for (auto const cells : {accesses[0].cells, buffers_->of_unit(Pool::gradient, unit)})
      for (auto& cell : cells_[cells]) cell.used_up = cell.padded = true;
    due_[unit].clear();
  }
  /// Moves a content between host memory and a staging slot.
  void stage(std::span<Access const> accesses) {
    auto const from = accesses[0].cells;
    if (from.pool == Pool::offloaded || from.pool == Pool::staged)
      expect_parameters(from, true);
    else if (at_.use == RunPosition::no_use)
      expect_due(from, program_->units[now_->unit].hooked);
    else
      expect_sum(from, world_of(now_->unit), now_->primitive == Primitive::store);
    fill(accesses[1].cells, Symbol(cells_[from][0]));
  }

  Buffers const* buffers_;
  std::vector<bool> padded_;
  PerCell<Symbol> cells_;
  std::vector<std::set<Term>> due_;     ///< by unit: since its last update
  std::vector<std::uint32_t> updates_;  ///< by unit
  std::vector<Symbol> packed_;          ///< contents of a bucket's cells, in its wire
  std::uint32_t bucket_of_wire_ = Operation::none;
  Operation const* now_ = nullptr;
  RunPosition at_;
  std::vector<std::string> problems_;
};

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE::step

namespace fsdp::inline FSDP_VERSION_NAMESPACE {

namespace detail {
/// Runs all kinds of micro-steps that the options allow: see check_program().
[[gnu::cold]] inline void run_all_kinds(step::BasicRun& run, step::Symbols& symbols, AllowedFlags const& allowed) {
  run.prepare();
  auto const last_micro_step = [&] {
    run.micro_step();
    run.norm();
    run.update();
    symbols.expect_updated();
  };
  for (std::size_t path = 1; path < run.program().paths(); ++path) {
    run.follow(path), last_micro_step();
    for (auto const flags : allowed) {
      run.follow(path), run.micro_step(flags), last_micro_step();
      run.frozen_micro_step(flags.reshard);
      run.micro_step(flags), run.follow(0), last_micro_step();
      run.micro_step(flags), run.follow(path), run.micro_step(), run.follow(0), last_micro_step();
      run.follow(path), run.evaluation();
      run.micro_step(flags), run.discard();
    }
  }
  run.follow(0);
  for (auto const flags : allowed) {
    for (int micro_steps = 1; micro_steps <= 2; ++micro_steps) {
      for (int i = 0; i < micro_steps; ++i) run.micro_step(flags);
      run.frozen_micro_step(flags.reshard);
      last_micro_step();
    }
    run.evaluation();
    run.micro_step(flags);
    run.discard();
  }
}
}  // namespace detail

/// Runs a program in symbols: all kinds of micro-steps that its options allow, each before and after plain ones, with
/// norms, updates, evaluations and discarded gradients; and so each path, alone and in turn with the declared order.
/// Operations run in the order in which the host enqueues them: it finds wrong contents, not missing waits. Engines
/// call it when they are sealed, if FSDP_CHECK_PROGRAM is defined.
/// @param input  of compile_program()
/// @return the first problem: step, use, unit, what was expected and what was found; empty if there is none
[[gnu::cold]] inline std::string check_program(Program const& program, StepInput const& input) {
  std::vector<bool> padded;
  for (auto const& unit : input.units) padded.push_back(unit.padded);
  step::Symbols symbols(program, std::move(padded));
  step::Run run(program, [&](step::Operation const& operation, step::RunPosition const& at,
                             step::Contents const& contents) { symbols.run(executed(operation, at, contents)); });
  std::string refused;  // the run goes no further, because of a problem that symbols have found, or do not know
  try {
    detail::run_all_kinds(run, symbols, AllowedFlags(program, input));
  } catch (Error const& error) {
    refused = error.what();
  }
  return symbols.problems().empty() ? refused : symbols.problems().front();
}

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE
