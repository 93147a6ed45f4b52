// SPDX-License-Identifier: Apache-2.0
// The result of clip_grad_norm, which optimizers clip by.
#pragma once

#include <cstdint>

#include "fsdp/error.hpp"
#include "fsdp/kernels/norms.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE {

/// The norm and the clipping factor that clip_grad_norm computed. The numbers stay in device memory until they
/// are read. An optimizer's step takes the object once. A default-constructed one is empty: a step with it clips
/// nothing.
template <class E>
class GradNorm {
 public:
  GradNorm() = default;
  GradNorm(E& engine, std::uint64_t measurement) : engine_(&engine), measurement_(measurement) {}

  /// The norm before clipping, until the next clip_grad_norm of the engine.
  /// @throws UsageError after that, and if this is no norm
  /// @note Waits for compute.
  double value() const { return read().norm; }
  /// Optimizer steps skipped so far because of a norm that was not finite, with any optimizer and norm of the engine.
  /// @throws UsageError as value() does
  /// @note Waits for compute.
  std::int64_t skipped() const { return read().skipped; }

  E const* engine() const { return engine_; }  ///< nullptr: this is no norm
  /// Numbers the engine's measurements, from 1.
  std::uint64_t measurement() const { return measurement_; }

 private:
  ClipScalars read() const {
    FSDP_EXPECTS(engine_ != nullptr, "GradNorm::value: expected a norm from clip_grad_norm, got an empty one");
    FSDP_EXPECTS(engine_->shards().checks().is_last_measurement(measurement_),
                 "rank {}: this norm is no longer valid, because clip_grad_norm has measured another; read a norm "
                 "before the next clip_grad_norm",
                 engine_->rank());
    auto const turn = engine_->shards().enter("GradNorm::value");
    ClipScalars scalars{};
    engine_->device().copy_async(engine_->compute(), &scalars, engine_->shards().norm().result, sizeof scalars);
    engine_->device().synchronize(engine_->compute());
    return scalars;
  }
  E* engine_ = nullptr;
  std::uint64_t measurement_ = 0;
};

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE
