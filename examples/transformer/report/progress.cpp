// SPDX-License-Identifier: Apache-2.0
#include "transformer/report/progress.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdio>
#include <system_error>

#include "transformer/launch/program.hpp"
#include "transformer/report/escape.hpp"
#include "transformer/report/terminal.hpp"

namespace transformer {

Progress::Progress(bool speaks, std::int64_t total)
    : speaks_(speaks), columns_(speaks ? static_cast<std::size_t>(terminal_columns()) : 0), total_(total) {
  advanced_ = said_ = Clock::now();
}

void Progress::say(std::string_view text) {
  if (!speaks_) return;
  clear();
  put(report::printable(text) + "\n");
  said_ = Clock::now();
}

void Progress::begin(std::int64_t done) {
  done_ = first_ = done;
  began_ = advanced_ = Clock::now();
  if (columns_ > 0) draw("", began_);  // the first iteration may take long
}

void Progress::advance(std::int64_t done, double loss) {
  if (columns_ > 0) advance(done, fmt::format(" loss {:.4f}", loss));
}

void Progress::advance(std::int64_t done, std::string_view note) {
  auto const now = Clock::now();
  done_ = done;
  advanced_ = now;
  if (columns_ == 0 && speaks_ && now - said_ >= std::chrono::seconds(5))
    say(fmt::format("{} of {}{}", done, total_, note));
  if (columns_ == 0) return;
  if (first_ < 0) first_ = done, began_ = now;
  if (now - drawn_ < std::chrono::milliseconds(100) && done < total_) return;
  draw(fmt::format("{}{}", note, remaining(now)), now);
}

void Progress::within(std::string_view what, std::int64_t done, std::int64_t of, std::string_view units) {
  using namespace std::chrono_literals;
  auto const now = Clock::now();
  bool const ends = done == of;
  if (!speaks_ || (now - advanced_ < 1s && !ends)) return;
  if (columns_ == 0) {
    if (now - std::max(said_, advanced_) >= 60s) say(fmt::format("{}: {} of {} {}", what, done, of, units));
  } else if (now - drawn_ >= 100ms || ends) {
    draw(fmt::format(" {}: {} of {} {}", what, done, of, units), now);
  }
}

void Progress::draw(std::string_view note, Clock::time_point now) {
  constexpr std::size_t width = 30;
  double const share =
      std::clamp(static_cast<double>(done_) / static_cast<double>(std::max<std::int64_t>(total_, 1)), 0.0, 1.0);
  auto const full = static_cast<std::size_t>(share * width);
  auto text = fmt::format("[{}{}] {:3.0f}% {}/{}{}", std::string(full, '='), std::string(width - full, ' '),
                          share * 100, done_, total_, note);
  text.resize(std::min(text.size(), columns_ - 1));  // a longer one would leave its first row behind
  put("\r\x1b[K" + text);
  drawn_ = now;
  drawn_once_ = true;
}

std::string Progress::remaining(Clock::time_point now) const {
  if (done_ <= first_) return "";
  double const each = std::chrono::duration<double>(now - began_).count() / static_cast<double>(done_ - first_);
  auto const seconds = static_cast<std::int64_t>(each * static_cast<double>(std::max<std::int64_t>(total_ - done_, 0)));
  if (seconds >= 3600) return fmt::format(", {}:{:02}:{:02} left", seconds / 3600, seconds / 60 % 60, seconds % 60);
  return fmt::format(", {}:{:02} left", seconds / 60, seconds % 60);
}

void Progress::put(std::string_view text) {
  if ((std::fwrite(text.data(), 1, text.size(), stdout) == text.size() && std::fflush(stdout) == 0) || warned_) return;
  warned_ = true;
  auto const warning =
      fmt::format("{}: warning: standard output cannot be written: {}; some lines of the output are missing\n",
                  program_name, std::generic_category().message(errno));
  std::fwrite(warning.data(), 1, warning.size(), stderr);
}

void Progress::clear() {
  if (drawn_once_) put("\r\x1b[K");
  drawn_once_ = false;
}

}  // namespace transformer
