// SPDX-License-Identifier: Apache-2.0
// Log lines, with a progress bar below them where they go to a terminal.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <string_view>

namespace transformer {

/// Writes to stdout. A disk that is full ends nothing: the first failure is said on stderr. On a terminal the last line
/// is a bar that lines push down; elsewhere there are lines alone.
class Progress {
 public:
  /// @param speaks  false: say nothing (every rank but the first)
  Progress(bool speaks, std::int64_t total);
  Progress(Progress const&) = delete;
  Progress& operator=(Progress const&) = delete;
  ~Progress() { clear(); }

  /// Prints a line, as report::printable() has it.
  void say(std::string_view text);

  /// So much is done when this process begins: the rest is what the time left is estimated from.
  void begin(std::int64_t done);
  void advance(std::int64_t done, double loss);
  /// Redraws the bar, ten times a second at most; without a terminal it prints a line, every five seconds at most.
  /// @param note  stands behind the numbers, with a blank before it
  void advance(std::int64_t done, std::string_view note);

  /// Tells how far something long has come that advance() does not count: an evaluation, the micro-steps of an
  /// iteration. Silent in its first second, but for its end. On a terminal it stands in the bar, elsewhere in a line a
  /// minute.
  /// @param what,units  as "evaluating" and "batches"
  void within(std::string_view what, std::int64_t done, std::int64_t of, std::string_view units);

 private:
  using Clock = std::chrono::steady_clock;

  void put(std::string_view text);
  void draw(std::string_view note, Clock::time_point now);
  std::string remaining(Clock::time_point now) const;
  void clear();

  bool speaks_;
  std::size_t columns_ = 0;  ///< of the terminal; 0: no bar
  bool drawn_once_ = false, warned_ = false;
  std::int64_t total_, done_ = 0;
  std::int64_t first_ = -1;    ///< done when the clock began; -1: not yet
  Clock::time_point began_{};  ///< when it was first_
  Clock::time_point advanced_{}, drawn_{}, said_{};
};

}  // namespace transformer
