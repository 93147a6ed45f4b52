// SPDX-License-Identifier: Apache-2.0
// nanogpt report: a page of one run or several, from the logs that `train` leaves.
#include <fmt/format.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <string_view>
#include <utility>
#include <vector>

#include "commands.hpp"
#include "report/log_reader.hpp"
#include "report/output.hpp"
#include "report/page.hpp"
#include "report/trace_reader.hpp"

namespace nanogpt {
namespace {

void write(std::filesystem::path const& path, std::string_view text) {
  report::write_output(path, text);
  fmt::print("wrote {}\n", path.string());
}

}  // namespace

int run_report(Settings const& settings) {
  if (settings.runs.empty())
    fsdp::fail<fsdp::ConfigError>("nanogpt report: expected the out_dir of a run, or several, got nothing");
  std::vector<report::Material> materials;
  for (auto const& folder : settings.runs) {
    auto run = report::read_run(folder);
    auto found = report::read_first_trace(run.traces, folder);
    materials.push_back({std::move(run), std::move(found.trace), std::move(found.missing)});
  }
  auto const page = settings.to.empty() ? std::filesystem::path(settings.runs[0]) / "report.html"
                                        : std::filesystem::path(settings.to);
  write(page, report::page(materials));
  if (!settings.svg.empty()) write(settings.svg, report::overview(materials[0]));
  return EXIT_SUCCESS;
}

}  // namespace nanogpt
