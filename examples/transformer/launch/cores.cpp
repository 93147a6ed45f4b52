// SPDX-License-Identifier: Apache-2.0
// The cores and the processor time that a process is given.
#include "transformer/launch/cores.hpp"

#include <sched.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <fstream>
#include <sstream>
#include <string>
#include <thread>

namespace transformer {
namespace {

namespace fs = std::filesystem;

/// quota / period, both in microseconds; nullopt if either is no positive number: "max", -1, or no such file.
std::optional<double> ratio(std::string const& quota, std::string const& period) {
  double microseconds = 0, of = 0;
  if (!(std::istringstream(quota) >> microseconds) || !(std::istringstream(period) >> of)) return std::nullopt;
  if (!(microseconds > 0) || !(of > 0)) return std::nullopt;
  return microseconds / of;
}

std::string first_line(fs::path const& file) {
  std::string text;
  std::ifstream stream(file);
  std::getline(stream, text);
  return text;
}

/// The limit of one group, in version 2's file or in version 1's.
std::optional<double> limit_of(fs::path const& group) {
  std::string quota, period;
  std::istringstream(first_line(group / "cpu.max")) >> quota >> period;
  if (auto const limit = ratio(quota, period)) return limit;
  return ratio(first_line(group / "cpu.cfs_quota_us"), first_line(group / "cpu.cfs_period_us"));
}

}  // namespace

std::vector<int> allowed_cores() {
  std::vector<int> cores;
  // The kernel refuses a set that is smaller than its own, whose size is not known.
  for (std::size_t words = 16; words <= 1024 && cores.empty(); words *= 2) {
    std::vector<cpu_set_t> set(words);
    std::size_t const bytes = words * sizeof(cpu_set_t);
    if (::sched_getaffinity(0, bytes, set.data()) != 0) continue;
    for (std::size_t core = 0; core < 8 * bytes; ++core)
      if (CPU_ISSET_S(core, bytes, set.data())) cores.push_back(static_cast<int>(core));
  }
  if (cores.empty())
    for (unsigned core = 0; core < std::max(1u, std::thread::hardware_concurrency()); ++core)
      cores.push_back(static_cast<int>(core));
  return cores;
}

std::optional<double> processor_quota(fs::path const& root) {
  std::optional<double> least;
  std::ifstream groups(root / "proc/self/cgroup");
  for (std::string line; std::getline(groups, line);) {  // hierarchy:controllers:/path
    auto const first = line.find(':'), second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    auto const controllers = "," + line.substr(first + 1, second - first - 1) + ",";
    bool const unified = controllers == ",,";
    if (!unified && controllers.find(",cpu,") == std::string::npos) continue;
    fs::path const top = root / "sys/fs/cgroup" / (unified ? "" : "cpu");
    // A limit of any group above holds too. In a container the path may be the host's, of which only the top is there.
    for (fs::path path = fs::path(line.substr(second + 1)).relative_path();; path = path.parent_path()) {
      if (auto const limit = limit_of(top / path)) least = std::min(least.value_or(*limit), *limit);
      if (path.empty()) break;
    }
  }
  return least;
}

int part_of_cores(std::vector<std::vector<int>> const& cores, std::size_t rank, std::optional<double> quota) {
  double part = 0;
  for (int const core : cores[rank]) {
    auto const sharers = std::count_if(cores.begin(), cores.end(), [&](std::vector<int> const& other) {
      return std::find(other.begin(), other.end(), core) != other.end();
    });
    part += 1.0 / static_cast<double>(sharers);
  }
  if (quota) part = std::min(part, *quota / static_cast<double>(cores.size()));
  return std::max(1, static_cast<int>(std::floor(part + 1e-9)));  // sums of thirds
}

}  // namespace transformer
