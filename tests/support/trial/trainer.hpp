// SPDX-License-Identifier: Apache-2.0
// One rank of a trial over an engine. Drivers see Trainer alone, whatever the strategy: engines are compiled once.
#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "fsdp/fsdp.hpp"
#include "fsdp/host.hpp"
#include "fsdp/local.hpp"
#include "fsdp/muon.hpp"
#include "fsdp/offload.hpp"
#include "fsdp/optimizers.hpp"
#include "fsdp/paths.hpp"
#include "tests/support/backward_flags.hpp"
#include "tests/support/program_dump.hpp"
#include "tests/support/trial/model.hpp"
#include "tests/support/trial/optimizers.hpp"
#include "tests/support/trial/part.hpp"

namespace trial {

class Trainer {
 public:
  virtual ~Trainer() = default;

  void run(Script const& script) {
    for (auto const& op : script) run(op);
  }
  /// @param inside  called in every module that the operation runs
  void run(Op const& op, Inside const& inside = {}) {
    switch (op.kind) {
      case Op::gradient_sync: set_gradient_sync(op.value != 0.0f); break;
      case Op::replica_sync: set_replica_sync(op.value != 0.0f); break;
      case Op::reshard: set_reshard(op.value != 0.0f); break;
      case Op::forward: forward(op, inside); break;
      case Op::backward: backward(op, inside); break;
      case Op::evaluate: evaluate([&] { forward(op, inside); }); break;
      case Op::discard: discard(); break;
      case Op::gradients: {
        auto gradients = export_gradients();
        if (rank_ == 0) outcome_.gradients.push_back(std::move(gradients));
        break;
      }
      case Op::import: import_parameters(); break;
      case Op::clip: {
        auto const norm = clip(op.value, op.norm, op.data != 0);
        if (op.data != 0) outcome_.norms.push_back(norm);
        break;
      }
      case Op::step: step(op.value); break;
      case Op::activations: freeze_parameters([&] { forward(op, inside), backward(op, inside); }); break;
    }
  }
  /// Exports the initial parameters. @note Collective: yes
  void begin() { outcome_.initial = export_parameters({}); }
  /// Exports the final parameters, and waits for everything and everybody. @note Collective: yes
  /// @param inside  called for every tensor that this rank gets
  void end(Inside const& inside = {}) {
    outcome_.parameters = export_parameters(inside);
    synchronize();
    expect_bytes();
    meet();
  }
  Outcome<float>& outcome() { return outcome_; }
  virtual fsdp::host::Stream& compute() = 0;
  virtual fsdp::host::Stream& gather() = 0;
  virtual std::uint64_t hashed_program() const = 0;

 protected:
  Trainer(Model const& model, std::vector<Segment> segments, int rank, int ranks)
      : model_(model),
        segments_(std::move(segments)),
        rank_(rank),
        ranks_(ranks),
        activations_(model.longest_order() + 1, std::vector<float>(elements(model.max_rows))),
        dy_(elements(model.max_rows)),
        dx_(elements(model.max_rows)) {}
  Trainer(Trainer const&) = delete;

  virtual void forward_part(std::size_t part, float const* x, float* y, Index rows, Inside const& inside) = 0;
  virtual void recompute_part(std::size_t part, float const* x, float* y, Index rows, Inside const& inside) = 0;
  virtual void backward_part(std::size_t part, float const* x, float const* dy, float* dx, Index rows,
                             Inside const& inside) = 0;
  virtual void evaluate(std::function<void()> const& passes) = 0;
  virtual void freeze_parameters(std::function<void()> const& passes) = 0;
  virtual void set_path(std::size_t path) = 0;
  virtual void set_gradient_sync(bool on) = 0;
  virtual void set_replica_sync(bool on) = 0;
  virtual void set_reshard(bool on) = 0;
  virtual void discard() = 0;
  virtual double clip(float most, fsdp::NormKind norm, bool reads) = 0;
  virtual void step(float rate) = 0;
  virtual Tensors<float> export_parameters(Inside const& inside) = 0;
  virtual Tensors<float> export_gradients() = 0;
  virtual void import_parameters() = 0;
  virtual void synchronize() = 0;
  virtual void expect_bytes() = 0;  ///< at rest, and never more than planned
  virtual void meet() = 0;          ///< a collective over the world

 private:
  std::size_t elements(Index rows) const { return static_cast<std::size_t>(rows * model_.width); }

  // The engine may refuse a part's turn. What belongs to it is enqueued in the module: not at all then.
  void forward(Op const& op, Inside const& inside) {
    auto const rows = rows_of(model_, op.data, rank_);
    auto const order = model_.order(op.path);
    auto const end = std::min(op.to, order.size());
    if (!model_.paths.empty() && op.from == 0) set_path(op.path);
    for (auto at = op.from; at < end; ++at) {
      auto const with_inputs = [&](fsdp::host::Stream& stream) {
        if (at == 0)
          stream.enqueue([this, data = op.data, n = elements(rows), to = activations_[0].data()] {
            for (std::size_t i = 0; i < n; ++i) to[i] = input_of(model_, data, rank_, static_cast<Index>(i));
          });
        if (inside) inside(stream);
      };
      forward_part(order[at], activations_[at].data(), activations_[at + 1].data(), rows, with_inputs);
    }
    if (end < order.size()) return;
    compute().enqueue([this, n = elements(rows), y = activations_[end].data()] {
      outcome_.outputs.insert(outcome_.outputs.end(), y, y + n);
    });
  }
  void backward(Op const& op, Inside const& inside) {
    auto const rows = rows_of(model_, op.data, rank_);
    auto const order = model_.order(op.path);
    for (auto at = std::min(op.to, order.size()); at-- > op.from;) {
      for (auto const& segment : segments_)
        if (segment.last == order[at]) recompute(segment, at + 1 - segment.size(), rows, inside);
      auto const with_loss = [&](fsdp::host::Stream& stream) {
        if (at + 1 == order.size())
          stream.enqueue([this, data = op.data, scale = loss_scale(model_, op.data, ranks_, op.value),
                          y = activations_[order.size()].data()] {
            loss_gradient<float>(model_, data, rank_, y, dy_.data(), scale);
          });
        if (inside) inside(stream);
      };
      // Each part reads one of the two and writes the other.
      bool const even = (order.size() - at) % 2 == 0;
      backward_part(order[at], activations_[at].data(), (even ? dx_ : dy_).data(), (even ? dy_ : dx_).data(), rows,
                    with_loss);
    }
  }

  /// Backward finds no output of forward in a segment: NaN, or what is recomputed.
  /// @param at  where the segment begins in the pass
  void recompute(Segment const& segment, std::size_t at, Index rows, Inside const& inside) {
    for (std::size_t i = 0; i < segment.size(); ++i)
      compute().enqueue(
          [&y = activations_[at + i + 1]] { std::fill(y.begin(), y.end(), std::numeric_limits<float>::quiet_NaN()); });
    for (std::size_t i = 0; i < segment.size(); ++i)
      recompute_part(segment.first + i, activations_[at + i].data(), activations_[at + i + 1].data(), rows, inside);
  }

  Model const model_;
  std::vector<Segment> const segments_;
  int const rank_, ranks_;
  Outcome<float> outcome_;
  std::vector<std::vector<float>> activations_;  ///< the input, and each part's output
  std::vector<float> dy_, dx_;
};

/// A part whose pointers an AdoptedUnit sets.
template <class E>
class AdoptedPart {
  using W = typename E::Param;

 public:
  /// @param slice  of the stacks that its pointers are to
  AdoptedPart(E& engine, fsdp::UnitId unit, Part part, Index slice)
      : part_(std::move(part)),
        slice_(slice),
        unit_(engine, unit, part_.spec.prefix, tensors(), {.kernels_are_enqueued = true}) {}
  AdoptedPart(AdoptedPart const&) = delete;

  void forward(fsdp::host::Stream& stream, float const* x, float* y, Index rows, Inside const& inside) {
    auto const scope = unit_.forward();
    enqueue_forward(stream, x, y, rows, inside);
  }
  void recompute(fsdp::host::Stream& stream, float const* x, float* y, Index rows, Inside const& inside) {
    auto const scope = unit_.recompute();
    if (scope) enqueue_forward(stream, x, y, rows, inside);
  }
  void backward(fsdp::host::Stream& stream, float const* x, float const* dy, float* dx, Index rows,
                Inside const& inside) {
    auto const scope = unit_.backward();
    if (!scope) return;
    auto const w = sliced(w_);
    part_.template enqueue_backward<W>(stream, {w[0], w[1], w[2]}, sliced(g_), {}, x, dy, dx, rows, inside);
  }

 private:
  void enqueue_forward(fsdp::host::Stream& stream, float const* x, float* y, Index rows, Inside const& inside) const {
    auto const w = sliced(w_);
    part_.template enqueue_forward<W>(stream, {w[0], w[1], w[2]}, x, y, rows, inside);
  }
  std::vector<fsdp::AdoptedTensor<W, float>> tensors() {
    std::vector<fsdp::AdoptedTensor<W, float>> adopted;
    for (auto const& tensor : part_.spec.tensors) {
      auto const i = tensor.shape.size() - 1;
      adopted.push_back(
          {part_.spec.prefix + "." + tensor.name, &w_[i], &g_[i], tensor.shape, part_.options(tensor), slice_});
    }
    return adopted;
  }
  /// The pointers to this slice.
  template <class T>
  Weights<T> sliced(Weights<T> pointers) const {
    for (auto const& tensor : part_.spec.tensors) pointers[tensor.shape.size() - 1] += slice_ * tensor.numel();
    return pointers;
  }

  Part part_;
  Index slice_;
  Weights<W> w_{};
  Weights<float> g_{};
  fsdp::AdoptedUnit<E> unit_;
};

/// A trainer over an engine.
template <class C, class P = fsdp::Fp32>
class EngineTrainer final : public Trainer {
 public:
  using Engine = fsdp::Engine<C, P>;

  EngineTrainer(C comm, Trial const& of, Setting const& setting)
      : Trainer(of.model, setting.segments, comm.rank(), comm.size()),
        mesh_(std::move(comm)),
        stream_(setting.inline_compute ? fsdp::host::Stream::inline_stream("compute") : fsdp::host::Stream("compute")),
        engine_(mesh_, setting.strategy(), options_of(of, setting), stream_),
        keeps_(setting.keeps),
        owners_(owners_of(of.model, of.optimizer)),
        momentum_(of.optimizer.momentum > 0.0f || !owners_.grouped.empty()) {
    std::map<std::size_t, fsdp::UnitId> units;
    for (auto const& part : of.model.parts) {
      auto const& unit = of.model.units[part.unit];
      auto& added = parts_.emplace_back();
      if (!units.contains(part.unit))
        units.emplace(part.unit, engine_.add_unit(unit, {.strategy = setting.strategy(part.unit),
                                                         .frozen = of.model.is_frozen(part.unit)}));
      if (part.adopted) {
        added.adopted = std::make_unique<AdoptedPart<Engine>>(engine_, units.at(part.unit),
                                                              Part(of.model, part, setting.replicates_vectors),
                                                              static_cast<Index>(parts_.size()) % 3);
      } else {
        added.module.emplace(
            engine_.shard(Part(of.model, part, setting.replicates_vectors), part.prefix, units.at(part.unit)));
      }
    }
    for (auto const& ahead : setting.ahead) {
      std::vector<fsdp::UseId> uses;
      for (auto const use : ahead.uses) uses.push_back({use});
      if (ahead.backward) {
        engine_.set_backward_prefetch(fsdp::UseId{ahead.at}, uses);
      } else {
        engine_.set_forward_prefetch(fsdp::UseId{ahead.at}, uses);
      }
    }
    for (auto const& path : of.model.paths) {
      std::vector<fsdp::UseId> uses;
      for (auto const use : path) uses.push_back({use});
      paths_.push_back(engine_.add_path("path " + std::to_string(paths_.size()), uses));
    }
    for (auto const& segment : setting.segments)
      engine_.recompute_segment(fsdp::UseId{segment.first}, fsdp::UseId{segment.last});
    if (setting.offloads_moments || setting.offloads_masters || setting.offloads_gradients)
      fsdp::offload(engine_, {.moments = setting.offloads_moments,
                              .masters = setting.offloads_masters,
                              .gradients = setting.offloads_gradients});
    if (setting.traced) engine_.start_trace(1000);
    auto const& how = of.optimizer;
    auto const selected = [](Owners::Names const& names) {
      auto selection = fsdp::TensorSelection::none();
      for (auto const& name : names) selection.add(name);
      return selection;
    };
    auto first = owners_.are_several() ? selected(owners_.first) : fsdp::TensorSelection::all();
    if (!owners_.second.empty())
      second_.emplace(engine_, selected(owners_.second), fsdp::SgdOptions{.momentum = second_momentum});
    if (!owners_.muon.empty()) muon_.emplace(engine_, selected(owners_.muon));
    if (!owners_.centred.empty()) centred_.emplace(engine_, selected(owners_.centred));
    std::vector<fsdp::ParamGroup> groups;
    if (!owners_.grouped.empty()) {
      auto& group = groups.emplace_back();
      group.tensors = owners_.grouped;
      group.lr_scale = grouped_lr_scale;
      group.weight_decay = grouped_weight_decay;
      (how.adamw ? group.beta1 : group.momentum) = grouped_momentum;
    }
    if (how.adamw)
      adamw_.emplace(engine_, std::move(first), fsdp::AdamWOptions{.weight_decay = how.weight_decay}, groups);
    else
      sgd_.emplace(engine_, std::move(first),
                   fsdp::SgdOptions{.momentum = how.momentum, .weight_decay = how.weight_decay}, groups);
    auto const add = [this](std::size_t at, auto& optimizer) {
      if (optimizer) several_[at] = AnyPart<Engine>(engine_, *optimizer);
    };
    add(0, centred_), add(1, muon_), add(2, second_), add(3, adamw_);
    if (sgd_) add(3, sgd_);
    if (owners_.are_several()) together_.emplace(several_[0], several_[1], several_[2], several_[3]);
  }

  fsdp::host::Stream& compute() override { return engine_.compute(); }
  fsdp::host::Stream& gather() override { return engine_.shards().gather_stream(); }
  std::uint64_t hashed_program() const override {
    fsdp::testing::ProgramDump dump;
    dump.add(engine_.program());
    return fsdp::hash_name(dump.text());
  }

 private:
  void forward_part(std::size_t part, float const* x, float* y, Index rows, Inside const& inside) override {
    auto& turn = parts_[part];
    if (turn.module) turn.module->forward(x, y, rows, inside);
    if (turn.adopted) turn.adopted->forward(compute(), x, y, rows, inside);
  }
  void recompute_part(std::size_t part, float const* x, float* y, Index rows, Inside const& inside) override {
    auto& turn = parts_[part];
    if (turn.module) turn.module->recompute(x, y, rows, inside);
    if (turn.adopted) turn.adopted->recompute(compute(), x, y, rows, inside);
  }
  void backward_part(std::size_t part, float const* x, float const* dy, float* dx, Index rows,
                     Inside const& inside) override {
    auto& turn = parts_[part];
    if (turn.module) turn.module->backward(x, dy, dx, rows, inside);
    if (turn.adopted) turn.adopted->backward(compute(), x, dy, dx, rows, inside);
  }
  void evaluate(std::function<void()> const& passes) override {
    auto const scope = engine_.evaluation();
    passes();
  }
  void freeze_parameters(std::function<void()> const& passes) override {
    auto const scope = engine_.frozen_parameters();
    passes();
  }
  static fsdp::EngineOptions options_of(Trial const& of, Setting const& setting) {
    auto options = setting.options;
    if (!of.model.paths.empty())
      options.without_gradient = of.model.zeros ? fsdp::WithoutGradient::zeros : fsdp::WithoutGradient::untouched;
    return options;
  }
  void set_path(std::size_t path) override {
    path_.reset();
    path_.emplace(engine_.follow(paths_[path]));
  }
  void set_gradient_sync(bool on) override { scopes_.no_sync(!on); }
  void set_replica_sync(bool on) override { scopes_.no_replica_sync(!on); }
  void set_reshard(bool on) override {
    if (keeps_) scopes_.keep_unsharded(!on);
  }
  void discard() override {
    engine_.discard_gradients();
    norm_ = {};
  }
  double clip(float most, fsdp::NormKind kind, bool reads) override {
    norm_ = fsdp::clip_grad_norm(engine_, most, {.norm = kind});
    return reads ? norm_.value() : 0.0;
  }
  void step(float rate) override {
    if (together_)
      together_->step({rate, rate, rate, rate}, norm_);
    else
      adamw_ ? adamw_->step(rate, norm_) : sgd_->step(rate, norm_);
    norm_ = {};
  }
  Tensors<float> export_parameters(Inside const& inside) override {
    Tensors<float> all;
    fsdp::export_full(engine_, [&](fsdp::TensorInfo const& tensor, std::span<float const> values) {
      if (inside) inside(compute());
      all.push_back({tensor.name, {values.begin(), values.end()}});
    });
    return by_name(std::move(all));
  }
  Tensors<float> export_gradients() override {
    Tensors<float> all;
    fsdp::export_gradients(engine_, [&](fsdp::TensorInfo const& tensor, std::span<float const> values) {
      if (!values.empty()) all.push_back({tensor.name, {values.begin(), values.end()}});
    });
    return by_name(std::move(all));
  }
  /// Settings that divide modules into units otherwise have another order.
  static Tensors<float> by_name(Tensors<float> all) {
    std::sort(all.begin(), all.end(), [](auto const& a, auto const& b) { return a.name < b.name; });
    return all;
  }
  void import_parameters() override {
    fsdp::import_shard(engine_, [](fsdp::TensorInfo const& tensor, Index first, std::span<float> values) {
      for (auto& value : values) value = imported_value(tensor.name, first++);
    });
  }
  void expect_bytes() override {
    if (muon_ || centred_) return;  // they allocate more, which no plan knows
    auto input = engine_.plan_input();
    int const moments = adamw_ ? 2 : momentum_ ? 1 : 0;
    input.moments = second_ ? 0 : moments;
    auto const plan = fsdp::memory_plan(input);
    // The plan knows one optimizer. Of a unit with two, each keeps the parts of its own tensors.
    std::int64_t shared = 0, largest[2] = {0, 0};
    auto const is_second = [this](std::string const& tensor) { return Owners::has(owners_.second, tensor) ? 1 : 0; };
    auto const shards = engine_.shards();
    for (std::size_t u = 0; second_ && u < shards.size(); ++u) {
      if (!shards[u].trains()) continue;
      std::int64_t of[2] = {0, 0};
      bool some[2] = {false, false};
      for (auto const& tensor : shards[u].layout().tensors()) some[is_second(tensor.name)] = true;
      for (auto const& part : shards[u].layout().segments(shards[u].shard()))
        of[is_second(shards[u].layout().tensors()[part.tensor].name)] +=
            fsdp::align_up(part.count, fsdp::layout_alignment);
      for (int i = 0; i < 2; ++i)
        if (some[i] && !some[1 - i]) of[i] = shards[u].shard_numel();
      for (int i = 0; i < 2; ++i) largest[i] = std::max(largest[i], of[i]);
      shared += 4 * (moments * of[0] + of[1]);
    }
    auto const in_host = plan.host + (input.offload.moments ? shared : 0);
    if (input.offload.moments) shared = 2 * 4 * (moments * largest[0] + largest[1]);
    auto const& account = engine_.account();
    auto const expect = [this](bool holds, std::string_view what, std::int64_t bytes, std::int64_t planned) {
      if (!holds)
        throw std::logic_error(fmt::format("rank {}: {} bytes {}, planned {}", engine_.rank(), bytes, what, planned));
    };
    auto const reserved = account.reserved_state() - shared, live = account.live_state() - shared;
    auto const peak = account.peak_live_state() - shared;
    expect(reserved == plan.reserved(), "reserved", reserved, plan.reserved());
    expect(live == plan.rest(), "in use at rest", live, plan.rest());
    auto const host = account.reserved(fsdp::MemoryTag::offloaded);
    expect(host == in_host, "reserved in host memory", host, in_host);
    expect(peak <= plan.live_most, "in use at most", peak, plan.live_most);
  }
  void synchronize() override {
    engine_.synchronize();
    if (engine_.tracer() != nullptr) engine_.stop_trace();
  }
  void meet() override { engine_.mean_over_ranks({1.0}); }

  /// One of the two.
  struct Turn {
    std::optional<fsdp::ShardedModule<Part, Engine>> module;
    std::unique_ptr<AdoptedPart<Engine>> adopted;
  };

  fsdp::Mesh<C> mesh_;
  fsdp::host::Stream stream_;
  Engine engine_;
  bool keeps_;
  Owners owners_;
  bool momentum_;
  fsdp::GradNorm<Engine> norm_;
  std::vector<Turn> parts_;
  std::vector<fsdp::PathId> paths_{fsdp::PathId{}};
  std::optional<decltype(std::declval<Engine&>().follow({}))> path_;
  fsdp::testing::BackwardScopes<Engine> scopes_{engine_};
  std::optional<fsdp::AdamW<Engine>> adamw_;
  std::optional<fsdp::Sgd<Engine>> sgd_, second_;
  std::optional<fsdp::Muon<Engine>> muon_;
  std::optional<Centred<Engine>> centred_;
  std::array<AnyPart<Engine>, 4> several_{AnyPart{engine_}, AnyPart{engine_}, AnyPart{engine_}, AnyPart{engine_}};
  std::optional<fsdp::Optimizers<AnyPart<Engine>, AnyPart<Engine>, AnyPart<Engine>, AnyPart<Engine>>> together_;
};

using Local = fsdp::local::Communicator<fsdp::host::Device>;

/// A trainer over threads of this process: compiled in trainers.cpp. @note Collective: yes
std::unique_ptr<Trainer> make_trainer(Local comm, Trial const& of, Setting const& setting);

}  // namespace trial
