// SPDX-License-Identifier: Apache-2.0
// Global gradient norm, and clipping by it.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <string_view>

#include "fsdp/concepts.hpp"
#include "fsdp/engine/user_checks.hpp"
#include "fsdp/error.hpp"
#include "fsdp/kernels/norms.hpp"
#include "fsdp/optim/grad_norm.hpp"
#include "fsdp/trace/trace.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE {

enum class NonFinite : unsigned char {
  skip,   ///< the optimizer step changes nothing; counted in GradNorm::skipped()
  raise,  ///< clip_grad_norm waits for the norm and throws
};

struct ClipOptions {
  NormKind norm = NormKind::l2;
  NonFinite non_finite = NonFinite::skip;
};

/// Measures the gradients' global norm, for an optimizer's step to scale them so that it is at most `max_norm`:
/// `adamw.step(lr, norm)`. While a GradScaler lives, it also takes the loss scale out: the norm that is limited and
/// reported is that of the unscaled gradients.
///
/// [Note: A norm that does not depend on the layout] Each unit is cut into the same slices whatever the strategy (see
/// Division), and one rank has each. It sums every 16,384 elements of a slice in double, in a fixed order. These shares
/// are added without rounding ([Note: Exact sums of shares]), so it does not matter which rank has which. Padding is
/// zero, shared parameters are stored once, and replicas do not count twice. The norm and the factor stay in device
/// memory: the optimizer kernel reads the factor.
///
/// Called again before the step, it goes on from what the first call has decided, whose norm it replaces: a call with
/// infinity then measures what the step will take. What was measured before another backward pass is void. A step that
/// is not given the norm that was to be limited is refused, as one with a norm that is void, replaced or used.
///
/// @param max_norm  positive; infinity measures without clipping
/// @throws UsageError if max_norm is not positive, or gradients are missing or left half-way; Error if the norm is not
/// finite and must not be
/// @note Stream: compute waits until all gradient shards are complete. The calling thread waits only under
/// NonFinite::raise.
/// @note Collective: one all-reduce of kernels::norm_digit_count doubles, or of W for the largest element.
template <class E>
[[nodiscard]] GradNorm<E> clip_grad_norm(E& engine, float max_norm, ClipOptions options = {}) {
  FSDP_EXPECTS(max_norm > 0.0f, "rank {}: clip_grad_norm: expected a positive max_norm, got {}", engine.rank(),
               max_norm);
  auto const shards = engine.shards();
  auto const turn = shards.enter("clip_grad_norm");
  shards.checks().expect_reduced("clip_grad_norm is called");
  shards.passes().complete_gradients();
  auto& norm = shards.norm();
  auto& compute = engine.compute();
  auto const& device = engine.device();
  auto const world = engine.world_size();
  auto const reading = shards.read_gradients();
  if (world > 1)
    shards.with_cause(
        [&] { shards.scalar_communicator().wait_for_peers(compute, norm.ticket, WaitSite::norm_peers_read); });
  auto span = shards.trace().begin(compute, StreamKind::compute, "gradient norm", "norm", "optimizer");
  auto const parts = options.norm == NormKind::inf ? world : kernels::norm_digit_count;
  std::int64_t partials = 0;
  for (std::size_t u = 0; u < shards.size(); ++u) {
    auto& unit = shards[u];
    if (!shards.has_gradient(unit)) continue;
    auto const slice = unit.slice();
    kernels::norm_partials(device, compute, static_cast<float const*>(unit.gradient + slice.begin), slice.size(),
                           options.norm, norm.partials + partials);
    partials += kernels::norm_partial_count(slice.size());
  }
  if (options.norm == NormKind::inf) {
    device.zero_async(compute, norm.parts, static_cast<std::size_t>(parts) * sizeof(double));
    kernels::norm_combine(device, compute, static_cast<double const*>(norm.partials), partials, options.norm,
                          norm.parts + engine.rank());
  } else {
    kernels::norm_digits(device, compute, static_cast<double const*>(norm.partials), partials, norm.parts);
  }
  span.end();
  if (world > 1) {
    span = shards.trace().begin(compute, StreamKind::compute, "gradient norm", "all-reduce", "optimizer",
                                parts * static_cast<std::int64_t>(sizeof(double)));
    std::array<char, 128> said{};
    auto const history = shards.history().text();
    auto const since = formatted_to(said, "{} norm with max_norm {}{}{}", name(options.norm), max_norm,
                                    history.empty() ? "" : ", ", history);
    norm.ticket = shards.with_cause([&] {
      return shards.scalar_communicator().all_reduce(compute, static_cast<double const*>(norm.parts), norm.parts,
                                                     static_cast<std::size_t>(parts),
                                                     Label{"gradient norm", "optimizer", since});
    });
    span.end();
  }
  span = shards.trace().begin(compute, StreamKind::compute, "gradient norm", "clip factor", "optimizer");
  kernels::clip_factor(device, compute, static_cast<double const*>(norm.parts), parts, options.norm, max_norm,
                       norm.loss_scale, norm.result, shards.checks().measured());
  span.end();
  GradNorm<E> const result(engine, shards.checks().set_measured(max_norm < std::numeric_limits<float>::infinity()));
  if (options.non_finite == NonFinite::raise) {
    auto const value = result.value();
    if (!math::is_finite(value))
      fail<Error>("rank {}: clip_grad_norm: the global gradient norm is {}, expected a finite number", engine.rank(),
                  value);
  }
  return result;
}
// clang-format off
void clip_grad_norm(detail::Anything, ...) = delete;  // fsdp: expected (engine, max_norm[, ClipOptions]); check the names in braces
// clang-format on

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE
