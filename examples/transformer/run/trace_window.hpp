// SPDX-License-Identifier: Apache-2.0
// `train --trace=FILE`: a few steps of training as a trace of all ranks, and as a table.
#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <string>
#include <vector>

#include "fsdp/trace.hpp"
#include "transformer/report/log_lines.hpp"
#include "transformer/report/metrics.hpp"
#include "transformer/run/choices.hpp"
#include "transformer/run/table.hpp"

namespace transformer {

/// Traces `trace_steps` steps. The first two steps of the process are not traced if it makes enough others; evaluations
/// are left out.
template <class T>
class TraceWindow {
 public:
  /// @param file   where rank 0 writes; without --trace nothing is traced
  /// @param start  this process's first iteration
  TraceWindow(T& trainer, Settings const& settings, JsonLog& file, std::int64_t start)
      : engine_(trainer.engine()),
        file_(file),
        name_(settings.trace),
        first_(std::clamp<std::int64_t>(settings.max_iters + 1 - settings.trace_steps, start, start + warm_up)),
        end_(first_ + settings.trace_steps),
        micro_steps_(trainer.source().micro_steps()) {}

  void before_step(std::int64_t iteration) {
    if (name_.empty() || iteration < first_ || iteration >= end_ || engine_.tracer() != nullptr) return;
    auto const units = static_cast<std::int64_t>(engine_.shards().size()) + 2;
    auto const buckets = static_cast<std::int64_t>(engine_.program().buckets.size());
    auto const a_step = micro_steps_ * (6 * units + buckets) + 2 * units;  // at most
    engine_.start_trace(static_cast<std::size_t>((end_ - iteration) * a_step), iteration);
  }
  /// Before what is no training.
  void pause() {
    if (name_.empty() || engine_.tracer() == nullptr) return;
    lost_ += engine_.tracer()->lost();
    auto spans = engine_.stop_trace();
    std::move(spans.begin(), spans.end(), std::back_inserter(spans_));
  }
  /// Once, when the steps are through or training ends: writes the file. @return the table, on rank 0
  /// @note Collective: yes.
  std::string after_step(std::int64_t iteration, bool last) {
    if (name_.empty() || written_ || (iteration + 1 != end_ && !last)) return {};
    written_ = true;
    pause();
    auto const ranks = fsdp::gather_trace(engine_.world(), spans_);
    spans_.clear();
    if (ranks.empty()) return {};
    bool const whole = file_.write(with_run_id(fsdp::chrome_trace(ranks)));
    std::string table;
    for (std::size_t rank = 0; rank < ranks.size(); ++rank) {
      auto const report = fsdp::overlap_report(ranks[rank]);
      if (rank == 0)
        table += fmt::format("trace of iterations {} to {} {} {}; rank 0:\n{}", first_, iteration,
                             whole ? "in" : "is missing in", name_, text(report));
      else
        table += fmt::format("rank {}: {}\n", rank, fsdp::summary(report));
    }
    if (lost_ > 0) table += fmt::format("{} spans of rank 0 are missing in the trace: its buffer was full\n", lost_);
    table.pop_back();
    return table;
  }

 private:
  static constexpr std::int64_t warm_up = 2;

  typename T::Engine& engine_;
  JsonLog& file_;
  std::string name_;
  std::int64_t first_, end_;  ///< iterations
  std::int64_t micro_steps_;
  bool written_ = false;
  std::size_t lost_ = 0;
  std::vector<fsdp::TraceSpan> spans_;
};

}  // namespace transformer
