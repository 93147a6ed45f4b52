// SPDX-License-Identifier: Apache-2.0
// Settings of the collectives benchmark: flags of nccl-tests, and a few more.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace bench {

enum class Collective : unsigned char { all_gather, reduce_scatter, all_reduce };
enum class Mode : unsigned char { table, overlap, units, sweep };

char const* name(Collective collective);

struct Settings {
  std::string comm;  ///< local, mpi; on CUDA local, nccl
  int ranks = 2;     ///< of --comm=local: threads
  std::vector<Collective> collectives;
  std::string type = "float";
  std::size_t min_bytes = std::size_t{64} << 10;
  std::size_t max_bytes = std::size_t{64} << 20;
  std::size_t step_factor = 4;
  std::size_t step_bytes = 0;                       ///< sizes grow by this instead of the factor
  std::size_t pool_bytes = std::size_t{128} << 20;  ///< of a rank's buffers: iterations rotate through them
  int iterations = 20;
  int warmup = 5;
  int rounds = 5;  ///< timed blocks of `iterations`; medians are reported
  bool check = true;
  bool bind = false;  ///< keep each rank's threads on one core
  std::string json;
  std::string hardware;        ///< file for `nanogpt plan`; empty: none
  bool between_nodes = false;  ///< each rank is on a node of its own

  Mode mode = Mode::table;
  std::size_t units = 8;
  int prefetch = 1;
  std::size_t unit_bytes = std::size_t{4} << 20;
  std::int64_t width = 256;  ///< of the square matrices that a unit consists of
  std::int64_t rows = 256;   ///< of the activations of a rank
  bool compare = true;       ///< also time the plain memory operation and the vendor's own collectives

  std::vector<std::size_t> sizes() const;
};

/// Features that the program was built with.
struct Build {
  std::vector<std::string> comms;
};

/// Fills `settings`. On a bad command line says so on stderr, once per run. @return the exit code, or -1 to go on
int parse(int argc, char** argv, Build const& build, Settings& settings);

}  // namespace bench
