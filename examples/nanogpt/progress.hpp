// SPDX-License-Identifier: Apache-2.0
// Log lines, with a progress bar below them where they go to a terminal.
#pragma once

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <string_view>

#include "fsdp/error.hpp"

namespace nanogpt {

/// Writes to stdout. On a terminal the last line is a bar that lines push down; elsewhere there are lines alone.
class Progress {
 public:
  /// @param speaks  false: say nothing (every rank but the first)
  Progress(bool speaks, std::int64_t total) : speaks_(speaks), bar_(speaks && wants_bar()), total_(total) {}
  Progress(Progress const&) = delete;
  Progress& operator=(Progress const&) = delete;
  ~Progress() { clear(); }

  void say(std::string_view text) {
    if (!speaks_) return;
    clear();
    fmt::print("{}\n", text);
    std::fflush(stdout);
  }

  void advance(std::int64_t done, double loss) {
    if (bar_) advance(done, fmt::format(" loss {:.4f}", loss));
  }
  /// Redraws the bar, ten times a second at most.
  /// @param note  what stands behind the numbers, with a blank before it
  void advance(std::int64_t done, std::string_view note) {
    if (!bar_) return;
    auto const now = Clock::now();
    if (now - drawn_ < std::chrono::milliseconds(100) && done < total_) return;
    drawn_ = now;
    if (done > first_ && first_ < 0) first_ = done, began_ = now;
    double const share =
        std::min(1.0, static_cast<double>(done) / static_cast<double>(std::max<std::int64_t>(total_, 1)));
    auto const full = static_cast<std::size_t>(share * width);
    fmt::print("\r\x1b[K[{}{}] {:3.0f}% {}/{}{}{}", std::string(full, '='), std::string(width - full, ' '), share * 100,
               done, total_, note, remaining(done, now));
    std::fflush(stdout);
    drawn_once_ = true;
  }

 private:
  using Clock = std::chrono::steady_clock;
  static constexpr std::size_t width = 30;

  /// mpirun gives its ranks terminals of their own, wherever their output goes: below it, NANOGPT_PROGRESS=1 asks for
  /// the bar.
  static bool wants_bar() {
    if (char const* const wish = std::getenv("NANOGPT_PROGRESS"); wish != nullptr) return std::string_view(wish) == "1";
    return ::isatty(STDOUT_FILENO) == 1 && std::getenv("OMPI_COMM_WORLD_SIZE") == nullptr &&
           std::getenv("PMI_SIZE") == nullptr;
  }
  std::string remaining(std::int64_t done, Clock::time_point now) const {
    if (done <= first_) return "";
    double const each = std::chrono::duration<double>(now - began_).count() / static_cast<double>(done - first_);
    auto const seconds =
        static_cast<std::int64_t>(each * static_cast<double>(std::max<std::int64_t>(total_ - done, 0)));
    return fmt::format(", {}:{:02} left", seconds / 60, seconds % 60);
  }
  void clear() {
    if (drawn_once_) fmt::print("\r\x1b[K");
    drawn_once_ = false;
  }

  bool speaks_, bar_;
  bool drawn_once_ = false;
  std::int64_t total_;
  std::int64_t first_ = -1;
  Clock::time_point began_{}, drawn_{};
};

}  // namespace nanogpt
