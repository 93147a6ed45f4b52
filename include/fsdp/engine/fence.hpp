// SPDX-License-Identifier: Apache-2.0
// An event that knows whether something waits for it.
#pragma once

#include <utility>

#include "fsdp/concepts.hpp"
#include "fsdp/error.hpp"
#include "fsdp/wait_site.hpp"

namespace fsdp {

/// What one stream tells another: signalled by the one, awaited once by the other.
template <Device D>
class Fence {
 public:
  using Stream = typename D::Stream;

  explicit Fence(D const& device) : event_(device.make_event()) {}

  /// What `stream` has been given so far is what the next await waits for.
  void signal(D const& device, Stream& stream) {
    device.record(event_, stream);
    signalled_ = true;
  }
  /// `stream` waits for the last signal.
  /// @throws UsageError if there was none since the last await
  void await(D const& device, Stream& stream, WaitSite site) {
    FSDP_EXPECTS(signalled_, "{}: a wait without a signal before it", name(site));
    await_pending(device, stream, site);
  }
  /// `stream` waits for the last signal, unless it was awaited already, or there was none.
  void await_pending(D const& device, Stream& stream, WaitSite site) {
    if (!signalled_) return;
    device.wait(stream, event_, site);
    signalled_ = false;
  }

 private:
  typename D::Event event_;
  bool signalled_ = false;
};

}  // namespace fsdp
