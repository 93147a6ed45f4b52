// SPDX-License-Identifier: Apache-2.0
// Points in time on a device's streams.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <utility>
#include <vector>

#include "fsdp/concepts.hpp"
#include "fsdp/trace.hpp"

namespace bench {

/// Marks as timed events: CUDA.
template <class D>
class EventMarks {
 public:
  EventMarks(D const& device, std::size_t count) : device_(device) {
    for (std::size_t i = 0; i < count; ++i) events_.push_back(device_.make_timed_event());
  }
  std::size_t size() const { return events_.size(); }
  /// The time at which `stream` comes to here is mark `index`.
  void set(typename D::Stream& stream, std::size_t index) { device_.record(events_[index], stream); }
  /// @pre both marks are set, and their streams have been synchronised
  double seconds(std::size_t from, std::size_t to) const {
    return static_cast<double>(device_.elapsed_milliseconds(events_[from], events_[to])) * 1e-3;
  }

 private:
  D device_;
  std::vector<typename D::Event> events_;
};

/// Marks that the streams themselves write: the host.
template <class D>
class StampMarks {
 public:
  StampMarks(D const& device, std::size_t count) : device_(device), times_(count) {}
  std::size_t size() const { return times_.size(); }
  void set(typename D::Stream& stream, std::size_t index) {
    device_.launch(stream, std::int64_t{1}, fsdp::detail::Stamp{}, &times_[index]);
  }
  double seconds(std::size_t from, std::size_t to) const {
    return static_cast<double>(times_[to] - times_[from]) * 1e-9;
  }

 private:
  D device_;
  std::vector<std::int64_t> times_;
};

template <class D>
concept HasTimedEvents = requires(D const device) {
  device.make_timed_event();
};

template <class D>
struct MarksOf {
  using type = StampMarks<D>;
};
template <HasTimedEvents D>
struct MarksOf<D> {
  using type = EventMarks<D>;
};
template <class D>
using Marks = typename MarksOf<D>::type;

}  // namespace bench
