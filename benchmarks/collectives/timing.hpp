// SPDX-License-Identifier: Apache-2.0
// Timed blocks: all ranks begin at one moment, and the slowest counts.
#pragma once

#include <fmt/format.h>
#include <sched.h>
#include <time.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <string>
#include <vector>

#include "fsdp/concepts.hpp"

namespace bench {

/// Nanoseconds of the clock that all processes of a machine share.
inline std::int64_t now_ns() {
  timespec now{};
  ::clock_gettime(CLOCK_MONOTONIC, &now);
  return std::int64_t{now.tv_sec} * 1'000'000'000 + now.tv_nsec;
}

/// Text that is equal for all processes of a machine.
inline std::string machine_id() {
  std::ifstream file("/proc/sys/kernel/random/boot_id");
  std::string id;
  file >> id;
  return id;
}

/// Lets the ranks of `comm` measure together.
template <class C>
class Stopwatch {
 public:
  explicit Stopwatch(C& comm) : comm_(comm) {
    auto const ids = comm.exchange(machine_id(), "machines");
    one_clock_ = std::all_of(ids.begin(), ids.end(), [&](auto const& id) { return id == ids.front(); });
  }

  /// Seconds that `block()` takes on this rank, from the moment that all ranks were to begin at: late starts count.
  /// @note Collective: yes.
  template <class Block>
  double time(Block&& block) {
    std::int64_t begin = 0;
    for (auto const& text : comm_.exchange(std::to_string(now_ns()), "times"))
      begin = std::max<std::int64_t>(begin, std::atoll(text.c_str()));
    begin = one_clock_ ? begin + lead_ns : now_ns();
    if (auto const left = begin - now_ns(); left > 200'000) {
      timespec const nap{0, static_cast<long>(left - 200'000)};
      ::nanosleep(&nap, nullptr);
    }
    while (now_ns() < begin) ::sched_yield();
    block();
    return static_cast<double>(now_ns() - begin) * 1e-9;
  }

  /// The largest of all ranks' values, place by place. @note Collective: yes.
  std::vector<double> slowest(std::vector<double> const& mine) {
    return combine(mine, [](double a, double b) { return std::max(a, b); });
  }
  std::vector<double> sum(std::vector<double> const& mine) {
    return combine(mine, [](double a, double b) { return a + b; });
  }

 private:
  static constexpr std::int64_t lead_ns = 1'500'000;  // for the ranks to learn of the beginning

  template <class Combine>
  std::vector<double> combine(std::vector<double> const& mine, Combine&& two) {
    std::string text;
    for (auto const value : mine) text += fmt::format("{:.17g} ", value);
    std::vector<double> total;
    for (auto const& theirs : comm_.exchange(text, "figures")) {
      char const* next = theirs.c_str();
      for (std::size_t i = 0; i < mine.size(); ++i) {
        char* end = nullptr;
        double const value = std::strtod(next, &end);
        next = end;
        if (total.size() <= i) {
          total.push_back(value);
        } else {
          total[i] = two(total[i], value);
        }
      }
    }
    return total;
  }

  C& comm_;
  bool one_clock_ = false;
};

inline double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  auto const half = values.size() / 2;
  return values.size() % 2 != 0 ? values[half] : 0.5 * (values[half - 1] + values[half]);
}

}  // namespace bench
