// SPDX-License-Identifier: Apache-2.0
// Results of the collectives benchmark, as a table and as JSON.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "settings.hpp"

namespace bench {

/// One form, out of place or in place. Times in seconds, of one collective.
struct Form {
  double time = 0;
  std::optional<double> plain;   ///< the plain memory operation
  double ratio = 0;              ///< median over rounds of plain's time by ours
  std::optional<double> vendor;  ///< MPI's own collective
  std::optional<std::int64_t> wrong;
};

struct Row {
  Collective collective{};
  std::size_t bytes = 0;
  std::size_t count = 0;  ///< elements, as nccl-tests counts them: of the smaller buffer
  Form out_of_place, in_place;
};

/// Overlap of communication and compute. Seconds of one pass.
struct OverlapRow {
  std::string what;       ///< a collective, or "full_shard"
  std::size_t bytes = 0;  ///< of a collective, or of a unit
  std::size_t units = 0;  ///< 0: single calls
  int prefetch = 0;
  double comm = 0, compute = 0, overlapped = 0;
  double compute_beside = 0;  ///< time of compute while communication runs
  std::size_t reserved = 0;   ///< bytes that the engine holds on a rank

  double slowdown() const { return compute_beside / compute; }
  double added() const { return overlapped - compute; }  ///< time that communication adds to compute alone
  double efficiency() const { return (comm + compute - overlapped) / (comm < compute ? comm : compute); }
};

/// Prints rows on one rank, and keeps them for the JSON file.
class Report {
 public:
  /// @param device in words; @param printing on this rank
  Report(Settings const& settings, int ranks, std::string device, bool printing);
  ~Report();

  void begin(Collective collective, std::string const& plain);
  void add(Row const& row);
  void begin_overlap(std::string const& compute);
  void add(OverlapRow const& row);
  /// Writes the JSON file, prints a summary of the rows. @return the exit code: 1 if elements were wrong
  int finish();

 private:
  struct Json;
  Settings const& settings_;
  int ranks_;
  bool printing_;
  std::int64_t wrong_ = 0;
  std::vector<OverlapRow> overlaps_;
  std::vector<std::pair<double, double>> gathers_;  ///< bytes and seconds of each all-gather
  std::unique_ptr<Json> json_;
};

}  // namespace bench
