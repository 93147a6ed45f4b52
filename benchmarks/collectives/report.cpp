// SPDX-License-Identifier: Apache-2.0
// The tables of the collectives benchmark.
#include "report.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <ctime>
#include <fstream>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <thread>
#include <utility>

#include "benchmarks/plan/hardware.hpp"

namespace bench {

struct Report::Json {
  nlohmann::ordered_json root;
};

namespace {

double bus_factor(Collective collective, int ranks) {
  auto const n = static_cast<double>(ranks);
  return (collective == Collective::all_reduce ? 2.0 : 1.0) * (n - 1) / n;
}

std::string microseconds(double seconds) {
  double const us = seconds * 1e6;
  return us < 100 ? fmt::format("{:.2f}", us) : us < 10000 ? fmt::format("{:.1f}", us) : fmt::format("{:.0f}", us);
}

std::string cells(Form const& form, double bytes, double factor, bool compare, bool vendor) {
  double const algbw = bytes / form.time * 1e-9;
  auto text = fmt::format("{:>9} {:>7.2f} {:>7.2f} {:>6}", microseconds(form.time), algbw, algbw * factor,
                          form.wrong ? fmt::format("{}", *form.wrong) : "N/A");
  if (compare)
    text += form.plain ? fmt::format(" {:>9} {:>6.1f}%", microseconds(*form.plain), 100 * form.ratio)
                       : fmt::format(" {:>9} {:>7}", "-", "-");
  if (compare && vendor) text += fmt::format(" {:>9}", form.vendor ? microseconds(*form.vendor) : "-");
  return text;
}

nlohmann::ordered_json json_of(Form const& form, double bytes, double factor) {
  nlohmann::ordered_json j{{"time_us", form.time * 1e6},
                           {"algbw_GBps", bytes / form.time * 1e-9},
                           {"busbw_GBps", bytes / form.time * 1e-9 * factor}};
  j["wrong"] = form.wrong ? nlohmann::ordered_json(*form.wrong) : nlohmann::ordered_json();
  if (form.plain) {
    j["plain_us"] = *form.plain * 1e6;
    j["ratio_to_plain"] = form.ratio;
  }
  if (form.vendor) j["mpi_us"] = *form.vendor * 1e6;
  return j;
}

std::string size_text(std::size_t bytes) {
  for (auto const& [shift, unit] : {std::pair<int, char const*>{20, "MiB"}, {10, "KiB"}})
    if (bytes >> shift != 0 && (bytes & ((std::size_t{1} << shift) - 1)) == 0)
      return fmt::format("{} {}", bytes >> shift, unit);
  return fmt::format("{} B", bytes);
}

/// A line through the smallest and the largest all-gather: bandwidth, and what does not depend on the size.
void write_hardware(Settings const& settings, int ranks, std::vector<std::pair<double, double>> const& gathers) {
  if (gathers.size() < 2)
    throw std::runtime_error(
        "--hardware needs all_gather in two sizes or more: see --collective, --minbytes, --maxbytes");
  auto const [smallest, largest] = std::minmax_element(gathers.begin(), gathers.end());
  auto const per_byte = (largest->second - smallest->second) / (largest->first - smallest->first);
  if (!(per_byte > 0))
    throw std::runtime_error("--hardware: the largest all_gather took no longer than the smallest; use larger sizes");
  auto const bandwidth = (ranks - 1.0) / ranks / per_byte;
  auto const fixed = std::max(0.0, smallest->second - per_byte * smallest->first);
  if (settings.between_nodes)
    return bench::write_hardware(settings.hardware,
                                 {{"network_bandwidth", bandwidth}, {"network_latency", fixed / (ranks - 1)}});
  bench::write_hardware(settings.hardware, {{"gpus_per_node", static_cast<double>(ranks)},
                                            {"node_bandwidth", bandwidth},
                                            {"node_latency", 0},
                                            {"launch", fixed}});
}

}  // namespace

Report::Report(Settings const& settings, int ranks, std::string device, bool printing)
    : settings_(settings), ranks_(ranks), printing_(printing), json_(std::make_unique<Json>()) {
  std::time_t const now = std::time(nullptr);
  char date[32] = {};
  std::strftime(date, sizeof date, "%Y-%m-%dT%H:%M:%SZ", std::gmtime(&now));
  json_->root = {{"comm", settings.comm},
                 {"ranks", ranks},
                 {"device", device},
                 {"cores", std::thread::hardware_concurrency()},
                 {"date", date},
                 {"datatype", settings.type},
                 {"iters", settings.iterations},
                 {"warmup_iters", settings.warmup},
                 {"rounds", settings.rounds},
                 {"pool_bytes", settings.pool_bytes},
                 {"bind", settings.bind}};
  if (!printing_) return;
  fmt::print("# {} ranks over {}, {}, {} cores, {}\n", ranks, settings.comm, device,
             std::thread::hardware_concurrency(), static_cast<char const*>(date));
  if (settings.mode == Mode::units || settings.mode == Mode::sweep) {
    fmt::print("# median of {} steps\n", settings.rounds);
  } else {
    fmt::print("# median of {} blocks of {} iterations; buffers rotate through {}\n", settings.rounds,
               settings.iterations, size_text(std::max(settings.pool_bytes, settings.max_bytes)));
  }
}

Report::~Report() = default;

void Report::begin(Collective collective, std::string const& plain) {
  if (!printing_) return;
  bool const vendor = settings_.comm == "mpi";
  fmt::print("#\n# {}\n", name(collective));
  if (settings_.compare) {
    fmt::print("# plain: {}\n# ratio: plain's time / ours in the same round, median over rounds\n", plain);
    if (vendor) fmt::print("# mpi: MPI's own {}\n", name(collective));
  }
  std::string form = fmt::format("{:>9} {:>7} {:>7} {:>6}", "time(us)", "algbw", "busbw", "#wrong");
  if (settings_.compare) form += fmt::format(" {:>9} {:>7}", "plain(us)", "ratio");
  if (settings_.compare && vendor) form += fmt::format(" {:>9}", "mpi(us)");
  auto const width = form.size();
  fmt::print("#{:>11} {:>10} {:>8} {:>6}  {:^{}}  {:^{}}\n", "", "", "", "", "out of place", width, "in place", width);
  fmt::print("#{:>11} {:>10} {:>8} {:>6}  {}  {}\n", "size(B)", "count", "type", "redop", form, form);
  std::fflush(stdout);
}

void Report::add(Row const& row) {
  for (auto const* form : {&row.out_of_place, &row.in_place}) wrong_ += form->wrong.value_or(0);
  double const factor = bus_factor(row.collective, ranks_);
  auto const bytes = static_cast<double>(row.bytes);
  bool const reduces = row.collective != Collective::all_gather;
  json_->root["rows"].push_back({{"collective", name(row.collective)},
                                 {"size", row.bytes},
                                 {"count", row.count},
                                 {"type", settings_.type},
                                 {"redop", reduces ? "sum" : "none"},
                                 {"out_of_place", json_of(row.out_of_place, bytes, factor)},
                                 {"in_place", json_of(row.in_place, bytes, factor)}});
  if (row.collective == Collective::all_gather) gathers_.push_back({bytes, row.out_of_place.time});
  if (!printing_) return;
  bool const vendor = settings_.comm == "mpi";
  fmt::print(" {:>11} {:>10} {:>8} {:>6}  {}  {}\n", row.bytes, row.count, settings_.type, reduces ? "sum" : "none",
             cells(row.out_of_place, bytes, factor, settings_.compare, vendor),
             cells(row.in_place, bytes, factor, settings_.compare, vendor));
  std::fflush(stdout);
}

void Report::begin_overlap(std::string const& compute) {
  json_->root["compute"] = compute;
  if (!printing_) return;
  fmt::print("#\n# compute: {}\n", compute);
  fmt::print(
      "# added = t_overlapped - t_comp: time that communication adds to compute, in % of t_comm\n"
      "# efficiency = (t_comm + t_comp - t_overlapped) / min(t_comm, t_comp); slowdown: of compute during "
      "communication\n");
  fmt::print("#{:>15} {:>10} {:>6} {:>8} {:>12} {:>12} {:>14} {:>9} {:>10} {:>9} {:>12}\n", "what", "size(B)", "units",
             "prefetch", "t_comm(us)", "t_comp(us)", "t_overlapped", "added%", "efficiency", "slowdown", "reserved(B)");
  std::fflush(stdout);
}

void Report::add(OverlapRow const& row) {
  overlaps_.push_back(row);
  json_->root["overlap"].push_back({{"what", row.what},
                                    {"size", row.bytes},
                                    {"units", row.units},
                                    {"prefetch", row.prefetch},
                                    {"t_comm_us", row.comm * 1e6},
                                    {"t_comp_us", row.compute * 1e6},
                                    {"t_overlapped_us", row.overlapped * 1e6},
                                    {"added_us", row.added() * 1e6},
                                    {"added_percent", 100 * row.added() / row.comm},
                                    {"efficiency", row.efficiency()},
                                    {"compute_slowdown", row.slowdown()},
                                    {"reserved_bytes", row.reserved}});
  if (!printing_) return;
  bool const single = row.units == 0;
  fmt::print(" {:>15} {:>10} {:>6} {:>8} {:>12} {:>12} {:>14} {:>9.1f} {:>10.2f} {:>9.2f} {:>12}\n", row.what,
             row.bytes, single ? "-" : fmt::format("{}", row.units), single ? "-" : fmt::format("{}", row.prefetch),
             microseconds(row.comm), microseconds(row.compute), microseconds(row.overlapped),
             100 * row.added() / row.comm, row.efficiency(), row.slowdown(),
             single ? "-" : fmt::format("{}", row.reserved));
  std::fflush(stdout);
}

int Report::finish() {
  if (settings_.mode == Mode::sweep && !overlaps_.empty()) {
    auto const best = std::min_element(overlaps_.begin(), overlaps_.end(),
                                       [](auto const& a, auto const& b) { return a.slowdown() < b.slowdown(); });
    json_->root["best"] = {{"unit_bytes", best->bytes}, {"prefetch", best->prefetch}};
    // The least memory within 3 % of the smallest slowdown: the recommended size of units.
    auto const frugal = std::min_element(overlaps_.begin(), overlaps_.end(), [&](auto const& a, auto const& b) {
      auto const near = [&](auto const& row) { return row.slowdown() <= 1.03 * best->slowdown(); };
      return near(a) != near(b) ? near(a) : a.reserved < b.reserved;
    });
    json_->root["frugal"] = {{"unit_bytes", frugal->bytes}, {"prefetch", frugal->prefetch}};
    if (printing_)
      fmt::print(
          "# smallest slowdown: units of {}, prefetch {}; least memory at up to 3 % more: units of {}, prefetch {}\n",
          size_text(best->bytes), best->prefetch, size_text(frugal->bytes), frugal->prefetch);
  }
  json_->root["wrong"] = wrong_;
  if (!printing_) return wrong_ == 0 ? 0 : 1;
  if (settings_.mode == Mode::table)
    fmt::print("# elements out of bounds: {}{}\n", wrong_,
               !settings_.check ? " (not checked)"
               : wrong_ == 0    ? " OK"
                                : " FAILED");
  if (!settings_.hardware.empty()) write_hardware(settings_, ranks_, gathers_);
  if (!settings_.json.empty()) {
    std::ofstream file(settings_.json);
    file << json_->root.dump(2) << '\n';
    if (!file.flush()) throw std::runtime_error("cannot write '" + settings_.json + "'");
  }
  std::fflush(stdout);
  return wrong_ == 0 ? 0 : 1;
}

}  // namespace bench
