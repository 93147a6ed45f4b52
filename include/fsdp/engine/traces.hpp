// SPDX-License-Identifier: Apache-2.0
// Members of an engine that start and end traces.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "fsdp/error.hpp"
#include "fsdp/owned.hpp"
#include "fsdp/trace/trace.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE::detail {

/// @tparam E  Engine, which has it as a base
template <class E>
class EngineTraces {
 public:
  /// Records a span for every gather, forward, backward, reduction, norm and optimizer update from now on, up to
  /// `capacity` spans. The first step gets the number `first_step`. A trace may be started, collected and stopped at
  /// any time, inside a use too: a span that is open then is left out.
  void start_trace(std::size_t capacity, std::int64_t first_step = 0) {
    auto const turn = core().calls.enter("start_trace");
    engine().synchronize();
    using Traces = Tracer<typename E::Device>;
    auto const first_span = core().trace.next_span();
    core().attach_tracer(Owned<Traces>(new Traces(core().device, core().account, capacity, first_step, first_span)));
  }
  /// Waits for all streams, and returns the spans since start_trace or the last collection. @pre start_trace was called
  std::vector<TraceSpan> collect_trace() {
    auto const turn = core().calls.enter("collect_trace");
    FSDP_EXPECTS(core().tracer, "rank {}: no trace was started; call start_trace first", engine().rank());
    engine().synchronize();
    return core().tracer->collect(*core().compute);
  }
  /// Collects for the last time, and stops the trace: from now on it costs a branch per span.
  std::vector<TraceSpan> stop_trace() {
    auto const turn = core().calls.enter("stop_trace");
    auto spans = collect_trace();
    core().attach_tracer({});
    return spans;
  }
  auto* tracer() { return core().tracer.get(); }  ///< nullptr while nothing is traced

 private:
  E& engine() { return static_cast<E&>(*this); }
  auto& core() { return engine().core_; }
};

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE::detail
