// SPDX-License-Identifier: Apache-2.0
// One rank's training run in which one task of one rank throws, and what has become of the weights then.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <filesystem>
#include <limits>
#include <map>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "fsdp/checkpoint.hpp"
#include "fsdp/fsdp.hpp"
#include "fsdp/full_state.hpp"
#include "fsdp/host.hpp"
#include "tests/support/devices.hpp"

namespace failing {

enum class Ending { nothing, mean, exports, saves };

/// A run, and the task that throws in it.
struct Case {
  fsdp::ShardingStrategy strategy = fsdp::FullShard{};
  bool clips = false;
  Ending ending = Ending::nothing;
  int rank = 1;                         ///< whose task throws
  int step = 0;                         ///< in which
  std::string_view phase = "backward";  ///< of the step: forward, backward, norm or optimizer
  std::string_view stream = "compute";
  int place = 0;  ///< among the tasks of that phase on that stream. 0: the first, 1: in the middle, 2: the last
  std::filesystem::path folder{};  ///< for Ending::saves
  static constexpr int steps = 6;

  bool in_update() const { return phase == "optimizer"; }
};

/// Counts a rank's tasks, and says which is to throw. Used by the rank's host thread.
struct Plan {
  Case const* planned = nullptr;
  int rank = 0;
  int step = 0;
  std::string_view phase;
  std::map<std::string, int> seen, before;  ///< tasks by phase and stream, in this step and in the one before
  bool thrown = false;

  void begin_step(int number) {
    step = number;
    before = std::exchange(seen, {});
  }
  /// A task is about to be enqueued. @return whether it throws
  bool throws(std::string_view stream) {
    auto const key = std::string(phase) + "/" + std::string(stream);
    auto const number = seen[key]++;
    if (planned == nullptr || planned->rank != rank || planned->step != step || planned->phase != phase ||
        planned->stream != stream)
      return false;
    auto const last = before[key] - 1;
    bool const now = number == (planned->place == 0 ? 0 : planned->place == 1 ? last / 2 : last);
    thrown |= now;
    return now;
  }
};

/// Its planned task throws.
struct Device : fsdp::testing::Forward<fsdp::host::Device> {
  Plan* plan = nullptr;

  void copy_async(Stream& stream, void* to, void const* from, std::size_t bytes) const {
    look(stream);
    base.copy_async(stream, to, from, bytes);
  }
  void zero_async(Stream& stream, void* to, std::size_t bytes) const {
    look(stream);
    base.zero_async(stream, to, bytes);
  }
  template <class Kernel, class... Args>
  void launch(Stream& stream, std::int64_t blocks, Kernel kernel, Args... args) const {
    look(stream);
    base.launch(stream, blocks, kernel, args...);
  }

 private:
  void look(Stream& stream) const {
    if (plan != nullptr && plan->throws(stream.name())) stream.enqueue([] { throw std::domain_error("boom"); });
  }
};
static_assert(fsdp::Device<Device>);

struct ReadFirst {
  template <class Block>
  void operator()(Block const&, std::int64_t, float const* from, double* to) const {
    *to = static_cast<double>(*from);
  }
};
struct AddRamp {
  template <class Block>
  void operator()(Block const&, std::int64_t, float* to, std::int64_t count) const {
    for (std::int64_t i = 0; i < count; ++i) to[i] += static_cast<float>(i % 7 + 1);
  }
};

/// Weights that are zero at first, and whose gradients are always i % 7 + 1.
struct Layer {
  Device device;
  std::int64_t elements;

  template <class T>
  struct Params {
    fsdp::Tensor<T, 1> w;
  };
  template <class T, class Visit>
  void describe(Params<T>& p, Visit&& tensor) const {
    tensor("w", p.w, {elements}, fsdp::no_decay);
  }
  /// @param first  gets the first weight
  template <class W>
  void forward(Device::Stream& stream, Params<W> const& w, double* first) const {
    device.launch(stream, std::int64_t{1}, ReadFirst{}, static_cast<float const*>(w.w.data), first);
  }
  template <class W, class G>
  void backward(Device::Stream& stream, Params<W> const&, Params<G> const& g) const {
    device.launch(stream, std::int64_t{1}, AddRamp{}, g.w.data, elements);
  }
};

/// The end of a rank.
struct Outcome {
  std::string error;  ///< what its body threw; "": nothing
  std::string wrong;  ///< a value that was read, and was not what it should have been
  int least = std::numeric_limits<int>::max(), most = 0;  ///< steps that this rank's weights have taken
  bool thrown = false;                                    ///< the planned task was enqueued here
};

template <class E>
void count_steps(E& engine, Outcome& outcome) {
  engine.drain();
  auto const shards = engine.shards();
  for (std::size_t u = 0; u < shards.size(); ++u) {
    auto const& unit = shards[u];
    for (auto const& part : unit.layout().segments(unit.shard())) {
      for (std::int64_t i = 0; i < part.count; ++i) {
        auto const taken = -unit.master[part.offset + i] / static_cast<float>((part.first + i) % 7 + 1);
        outcome.least = std::min(outcome.least, static_cast<int>(std::floor(taken)));
        outcome.most = std::max(outcome.most, static_cast<int>(std::ceil(taken)));
      }
    }
  }
}

/// Trains as docs/tutorial.md does: reads each loss one step later, by an event.
template <class Comm>
void run_rank(Comm comm, Plan& plan, Case const& planned, Outcome& outcome) {
  plan.planned = &planned;
  plan.rank = comm.rank();
  fsdp::Mesh<Comm> mesh(std::move(comm));
  fsdp::Engine<Comm> engine(mesh, planned.strategy, {.bucket_bytes = 3000, .first_bucket_bytes = 700});
  std::array<double, Case::steps> losses{};
  std::vector<Layer> modules;
  for (std::int64_t const elements : {300, 70, 1000}) modules.push_back({engine.device(), elements});
  auto layers = engine.shard(std::move(modules), "layer");
  fsdp::Sgd sgd(engine, {.lr = 1.0f});
  auto loss_is_there = engine.device().make_event();
  double usual_norm = -1.0;
  std::exception_ptr thrown;
  auto const expect = [&](std::string_view what, double value, double expected) {
    if (std::abs(value - expected) > 1e-6 && outcome.wrong.empty())
      outcome.wrong = fsdp::formatted("{} is {}, should be {}", what, value, expected);
  };
  try {
    for (int step = 0; step < Case::steps; ++step) {
      plan.begin_step(step);
      plan.phase = "forward";
      for (auto& layer : layers) layer.forward(&losses[static_cast<std::size_t>(step)]);
      if (step > 0) {
        engine.device().synchronize(loss_is_there);
        auto const loss = losses[static_cast<std::size_t>(step - 1)];
        expect("a loss", loss, static_cast<double>(1 - step));
        expect("a mean loss", engine.mean_over_ranks({loss})[0], static_cast<double>(1 - step));
      }
      engine.device().record(loss_is_there, engine.compute());
      plan.phase = "backward";
      for (auto i = layers.size(); i-- > 0;) layers[i].backward();
      fsdp::GradNorm<fsdp::Engine<Comm>> norm;
      if (planned.clips) {
        plan.phase = "norm";
        norm = fsdp::clip_grad_norm(engine, 1e30f);
        plan.phase = "reading";
        if (step % 2 == 0) {
          auto const value = norm.value();
          if (usual_norm < 0.0) usual_norm = value;
          expect("a norm", value, usual_norm);
        }
      }
      plan.phase = "optimizer";
      sgd.step(norm);
      plan.phase = "between";
    }
    if (planned.ending != Ending::nothing) engine.synchronize();
    if (planned.ending == Ending::mean) static_cast<void>(engine.mean_over_ranks({1.0}));
    if (planned.ending == Ending::exports) fsdp::export_full(engine, [](auto const&, auto const&) {});
    if (planned.ending == Ending::saves) fsdp::save(engine, sgd, planned.folder);
  } catch (std::exception const& error) {
    thrown = std::current_exception();
    outcome.error = error.what();
  }
  outcome.thrown = plan.thrown;
  count_steps(engine, outcome);
  if (thrown != nullptr) std::rethrow_exception(thrown);
}

/// Errors in the end of a run; "": none.
/// @param report  what the run as a whole has reported
inline std::string judge(Case const& planned, std::vector<Outcome> const& outcomes, std::string const& report) {
  if (!outcomes[static_cast<std::size_t>(planned.rank)].thrown) return {};  // there is no such task
  std::string text;
  int least = std::numeric_limits<int>::max(), most = 0;
  auto const named = fsdp::formatted("rank {} failed: boom", planned.rank);
  for (std::size_t rank = 0; rank < outcomes.size(); ++rank) {
    auto const& outcome = outcomes[rank];
    least = std::min(least, outcome.least), most = std::max(most, outcome.most);
    if (!outcome.wrong.empty()) text += fsdp::formatted("rank {}: {}. ", rank, outcome.wrong);
    bool const own = static_cast<int>(rank) == planned.rank;
    if (!outcome.error.empty() && outcome.error.find(own ? std::string("boom") : named) == std::string::npos)
      text += fsdp::formatted("rank {} says: {}. ", rank, outcome.error);
    if (outcome.error.empty() && planned.ending != Ending::nothing)
      text += fsdp::formatted("rank {} ends as if nothing had happened. ", rank);
  }
  if (report.find("boom") == std::string::npos) text += fsdp::formatted("the run reports '{}'. ", report);
  // After the reductions of a unit are complete, the streams that reduce go on to prepare for the next step.
  bool const may_step = planned.in_update() || planned.stream == "reduce" || planned.stream == "replicate";
  if (least < planned.step || most > planned.step + (may_step ? 1 : 0) || (least != most && !planned.in_update()))
    text += fsdp::formatted("weights have taken {} to {} steps. ", least, most);
  if (!planned.folder.empty() && std::filesystem::exists(planned.folder / "latest")) text += "a checkpoint was saved. ";
  return text;
}

}  // namespace failing
