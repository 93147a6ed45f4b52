// SPDX-License-Identifier: Apache-2.0
// The subcommand `report` writes a page about one run or several, from their logs.
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <signal.h>
#include <sys/stat.h>
#include <time.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "transformer/data/new_file.hpp"
#include "transformer/launch/program.hpp"
#include "transformer/report/csv.hpp"
#include "transformer/report/escape.hpp"
#include "transformer/report/log_lines.hpp"
#include "transformer/report/log_reader.hpp"
#include "transformer/report/notes.hpp"
#include "transformer/report/output.hpp"
#include "transformer/report/page.hpp"
#include "transformer/report/trace_reader.hpp"
#include "transformer/run/commands.hpp"

namespace transformer {
namespace {

using Clock = std::chrono::steady_clock;

void write(std::filesystem::path const& path, std::string_view text, bool says) {
  report::write_output(path, text);
  if (says) fmt::print("wrote {}\n", path.string());
}

std::filesystem::path page_path(Settings const& settings) {
  return settings.to.empty() ? std::filesystem::path(settings.runs[0]) / "report.html"
                             : std::filesystem::path(settings.to);
}

/// Reads the runs and writes what the settings ask for.
/// @param reload_seconds  as of report::page
/// @param says  prints what was written, and what is wrong with a run
void write_report(Settings const& settings, int reload_seconds, bool says) {
  std::vector<report::Material> materials;
  for (auto const& folder : settings.runs) {
    auto run = report::read_run(folder);
    auto found = report::read_first_trace(run.traces, folder);
    materials.push_back({std::move(run), std::move(found.trace), std::move(found.missing)});
  }
  auto const page = report::page(materials, reload_seconds);
  if (settings.to.empty())  // the user has not named this file: a link there may lead anywhere
    report::replace_file(page_path(settings), page);
  else
    report::write_output(settings.to, page);
  if (says) fmt::print("wrote {}\n", page_path(settings).string());
  if (!settings.svg.empty()) write(settings.svg, report::overview(materials[0]), says);
  if (!settings.csv.empty()) {
    std::vector<report::Run const*> runs;
    for (auto const& material : materials) runs.push_back(&material.run);
    write(settings.csv, report::csv(runs), says);
  }
  if (!says) return;
  for (auto const& material : materials)
    if (auto const null = report::null_losses(material.run); !null.empty())
      fmt::print("warning: {}: {}\n", material.run.name, null);
}

/// Changes with every line that is written to one of the logs; 0s where there is no log yet.
std::vector<std::int64_t> states(Settings const& settings) {
  std::vector<std::int64_t> found;
  for (auto const& folder : settings.runs) {
    struct stat info {};
    bool const there = ::stat((std::filesystem::path(folder) / log_file_name).c_str(), &info) == 0;
    found.insert(found.end(), {there ? info.st_size : 0, there ? info.st_mtim.tv_sec : 0,
                               there ? static_cast<std::int64_t>(info.st_mtim.tv_nsec) : 0});
  }
  return found;
}

/// Rewrites the page while the logs grow, until Ctrl-C or SIGTERM; then once more, as a page that is not loaded again.
int watch(Settings const& settings) {
  constexpr int reload_seconds = 5;
  sigset_t ends;
  ::sigemptyset(&ends);
  ::sigaddset(&ends, SIGINT);
  ::sigaddset(&ends, SIGTERM);
  ::sigprocmask(SIG_BLOCK, &ends, nullptr);
  fmt::print("watching {}: {} is rewritten as the log grows; Ctrl-C ends\n", fmt::join(settings.runs, ", "),
             page_path(settings).string());
  std::fflush(stdout);
  std::vector<std::int64_t> written;
  std::string trouble;
  // A page of a long run takes seconds to make: at most a tenth of the time is spent on that.
  Clock::duration pause = std::chrono::seconds(1);
  for (bool on = true; on;) {
    if (auto const now = states(settings); now != written) {
      auto const began = Clock::now();
      try {
        write_report(settings, reload_seconds, false);
        written = now;
        trouble.clear();
      } catch (fsdp::ConfigError const& error) {  // no log yet, or none with a line of a run
        if (trouble != error.what()) fmt::print("waiting: {}\n", report::printable(error.what()));
        std::fflush(stdout);
        trouble = error.what();
      }
      pause = std::max<Clock::duration>(std::chrono::seconds(1), 9 * (Clock::now() - began));
    }
    auto const whole = std::chrono::duration_cast<std::chrono::seconds>(pause);
    timespec const span{static_cast<time_t>(whole.count()), 0};
    on = ::sigtimedwait(&ends, nullptr, &span) < 0;
  }
  if (written.empty()) return EXIT_SUCCESS;
  write_report(settings, 0, true);
  return EXIT_SUCCESS;
}

}  // namespace

int run_report(Settings const& settings) {
  if (settings.runs.empty())
    fsdp::fail<fsdp::ConfigError>("{} report: expected the out_dir of a run, or several, got nothing", program_name);
  if (settings.watch) return watch(settings);
  remove_on_signals();
  write_report(settings, 0, true);
  return EXIT_SUCCESS;
}

}  // namespace transformer
