// SPDX-License-Identifier: Apache-2.0
// The command line of the collectives benchmark.
#include "settings.hpp"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <initializer_list>
#include <map>
#include <optional>

namespace bench {

char const* name(Collective collective) {
  switch (collective) {
    case Collective::all_gather: return "all_gather";
    case Collective::reduce_scatter: return "reduce_scatter";
    case Collective::all_reduce: return "all_reduce";
  }
  return "?";
}

std::vector<std::size_t> Settings::sizes() const {
  std::vector<std::size_t> all;
  for (std::size_t size = min_bytes; size <= max_bytes; size = step_bytes > 0 ? size + step_bytes : size * step_factor)
    all.push_back(size);
  return all;
}

namespace {

/// The first of these environment variables that is set, as a number.
std::optional<int> number_from(std::initializer_list<char const*> variables) {
  for (auto const* variable : variables)
    if (char const* const text = std::getenv(variable); text != nullptr && *text != '\0') return std::atoi(text);
  return std::nullopt;
}

/// Variables that an MPI launcher (mpirun, mpiexec, srun) sets for its processes.
struct Launch {
  /// Open MPI; Hydra, Intel MPI and every launcher that speaks PMI; MVAPICH. They set these for one process, too.
  std::optional<int> size = number_from({"OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE"});
  /// Tasks of the step that srun started. A shell in an allocation is such a step, of one task; a batch script is none.
  std::optional<int> tasks = number_from({"SLURM_STEP_NUM_TASKS"});

  /// PMIx alone tells a process its rank, and not how many there are.
  bool by_mpi() const { return size || (tasks ? *tasks > 1 : number_from({"PMIX_RANK"}).has_value()); }
  /// Nothing where the launcher does not say.
  std::optional<int> processes() const {
    if (size || tasks) return size ? size : tasks;
    return by_mpi() ? std::nullopt : std::optional<int>{1};
  }
};

/// This process's number in the run, so that messages are said once.
int launched_rank() {
  return number_from({"OMPI_COMM_WORLD_RANK", "PMI_RANK", "MV2_COMM_WORLD_RANK", "PMIX_RANK", "SLURM_PROCID", "RANK"})
      .value_or(0);
}

/// One byte count: 8, 64K, 1M, 2G, with or without a B behind.
std::string read_bytes(std::string const& text, std::size_t& bytes) {
  std::size_t digits = 0;
  while (digits < text.size() && text[digits] >= '0' && text[digits] <= '9') ++digits;
  auto const unit = text.substr(digits);
  static std::map<std::string, int> const shifts{{"", 0},    {"B", 0},    {"K", 10}, {"KB", 10}, {"KiB", 10}, {"M", 20},
                                                 {"MB", 20}, {"MiB", 20}, {"G", 30}, {"GB", 30}, {"GiB", 30}};
  auto const shift = shifts.find(unit);
  if (digits == 0 || digits > 10 || shift == shifts.end())
    return fmt::format("expected a byte count such as 8, 64K, 1M or 2G, got '{}'", text);
  bytes = static_cast<std::size_t>(std::strtoull(text.c_str(), nullptr, 10)) << shift->second;
  return {};
}

CLI::Option* add_bytes(CLI::App& app, std::string const& flag, std::size_t& bytes, std::string const& description) {
  return app
      .add_option_function<std::string>(
          flag,
          [&bytes, flag](std::string const& text) {
            if (auto const error = read_bytes(text, bytes); !error.empty()) throw CLI::ValidationError(flag, error);
          },
          fmt::format("{} ({} bytes)", description, bytes))
      ->type_name("BYTES");
}

void require(bool holds, std::string const& message) {
  if (!holds) throw CLI::ValidationError(message);
}

void check_together(Settings const& s, bool ranks_given) {
  int const processes = s.comm == "nccl" ? number_from({"WORLD_SIZE"}).value_or(1) : Launch{}.processes().value_or(2);
  require(s.min_bytes > 0 && s.min_bytes <= s.max_bytes,
          fmt::format("-b {} and -e {}: expected 0 < minbytes <= maxbytes", s.min_bytes, s.max_bytes));
  require(s.pool_bytes > 0, "--pool: expected a positive byte count");
  require(s.comm == "local" || !ranks_given,
          fmt::format("--ranks is for --comm=local: with --comm={} the launcher decides the number", s.comm));
  require(s.comm != "local" || processes == 1,
          "--comm=local runs all ranks in one process: start it without mpirun, with --ranks");
  bool const alone = s.mode == Mode::units || s.mode == Mode::sweep;
  require(s.comm != "local" || s.ranks >= (alone ? 1 : 2), fmt::format("--ranks={}: expected 2 or more", s.ranks));
  require(s.comm == "local" || processes > 1 || alone,
          "one process has no peers: start several (mpirun -np 2; for nccl torchrun's variables), or use "
          "--comm=local --ranks=2");
  require(s.unit_bytes > 0, "--unit_bytes: expected a positive byte count");
}

/// Which modes an option means something in; elsewhere it is refused rather than ignored.
struct Scope {
  CLI::Option* option;
  std::vector<Mode> modes;
};

char const* name(Mode mode) {
  switch (mode) {
    case Mode::table: return "the table of collectives";
    case Mode::overlap: return "--overlap";
    case Mode::units: return "--overlap --units";
    case Mode::sweep: return "--sweep";
  }
  return "?";
}

}  // namespace

int parse(int argc, char** argv, Build const& build, Settings& s) {
  CLI::App app(
      "Times collectives as nccl-tests does, and the plain copies or sums that each needs at least.\n"
      "S is the total size in bytes (all_gather: of the result; reduce_scatter: of a rank's input); algbw = S/t;\n"
      "busbw = algbw * (n-1)/n, for all_reduce algbw * 2(n-1)/n. Times are medians over rounds of the mean over\n"
      "iterations, of the slowest rank.");
  bool const can_mpi = std::find(build.comms.begin(), build.comms.end(), "mpi") != build.comms.end();
  s.comm = can_mpi && Launch{}.by_mpi() ? "mpi" : build.comms.front();
  std::vector<Scope> scopes;
  std::vector<Mode> const single{Mode::table, Mode::overlap};
  std::vector<Mode> const products{Mode::overlap, Mode::units, Mode::sweep};
  auto const number = [&](std::string const& flag, auto& value, std::string const& description, double least,
                          double most, std::vector<Mode> modes) {
    scopes.push_back({app.add_option(flag, value, description)->check(CLI::Range(least, most))->capture_default_str(),
                      std::move(modes)});
    return scopes.back().option;
  };
  auto const bytes = [&](std::string const& flag, std::size_t& value, std::string const& description,
                         std::vector<Mode> modes) {
    scopes.push_back({add_bytes(app, flag, value, description), std::move(modes)});
  };
  bytes("-b,--minbytes", s.min_bytes, "smallest size", single);
  bytes("-e,--maxbytes", s.max_bytes, "largest size", single);
  number("-f,--stepfactor", s.step_factor, "factor between sizes", 2, 1 << 20, single);
  bytes("-i,--stepbytes", s.step_bytes, "distance between sizes, instead of the factor", single);
  number("-n,--iters", s.iterations, "collectives in a timed block", 1, 1e6, single);
  number("-w,--warmup_iters", s.warmup, "collectives before timing", 0, 1e6, {Mode::table});
  number("--rounds", s.rounds, "number of timed blocks; the result is their median", 1, 1e4,
         {Mode::table, Mode::overlap, Mode::units, Mode::sweep});
  number("-c,--check", s.check, "check every element of one run of each form (0 or 1)", 0, 1, {Mode::table});
  std::string op = "sum";
  scopes.push_back({app.add_option("-o,--op", op, "reduction; only sum is supported")
                        ->check(CLI::IsMember({"sum"}))
                        ->capture_default_str(),
                    {Mode::table}});
  scopes.push_back({app.add_option("-d,--datatype", s.type, "element type")
                        ->check(CLI::IsMember({"float", "double", "half", "bfloat16"}))
                        ->capture_default_str(),
                    {Mode::table}});
  std::map<std::string, Collective> const names{{"all_gather", Collective::all_gather},
                                                {"reduce_scatter", Collective::reduce_scatter},
                                                {"all_reduce", Collective::all_reduce}};
  s.collectives = {Collective::all_gather, Collective::reduce_scatter, Collective::all_reduce};
  scopes.push_back({app.add_option("--collective", s.collectives, "collectives, separated by commas")
                        ->delimiter(',')
                        ->transform(CLI::CheckedTransformer(names, CLI::ignore_case))
                        ->type_name("LIST")
                        ->option_text("all_gather,reduce_scatter,all_reduce"),
                    single});
  app.add_option("--comm", s.comm, "communicator; default mpi under mpirun or srun")
      ->check(CLI::IsMember(build.comms))
      ->capture_default_str();
  auto* const ranks = app.add_option("--ranks", s.ranks, "number of ranks with --comm=local, which are threads")
                          ->check(CLI::Range(1, 64))
                          ->capture_default_str();
  bytes("--pool", s.pool_bytes, "bytes of the buffers through which iterations rotate, so that caches do not help",
        single);
  number("--compare", s.compare, "also time the plain memory operation and MPI's own collectives (0 or 1)", 0, 1,
         {Mode::table});
  app.add_option("--bind", s.bind, "bind the threads of each rank to one core (0 or 1)")->capture_default_str();
  app.add_option("--json", s.json, "also write the results to this file");
  scopes.push_back({app.add_option("--hardware", s.hardware,
                                   "also write bandwidth and launch of all_gather to this hardware file of nanogpt "
                                   "plan; the ranks must be those of one node; other lines of the file stay"),
                    {Mode::table}});
  scopes.push_back(
      {app.add_flag("--between_nodes", s.between_nodes,
                    "with --hardware: each rank is on a node of its own; write the network's bandwidth and "
                    "latency of a hop"),
       {Mode::table}});

  bool overlap = false;
  bool sweep = false;
  app.add_flag("--overlap", overlap, "run collectives during matrix products");
  auto* const units = number("--units", s.units,
                             "with --overlap: measure a FullShard engine with this many units instead of single calls",
                             1, 4096, {Mode::units, Mode::sweep});
  number("--prefetch", s.prefetch, "prefetch of the engine", 0, 64, {Mode::units});
  bytes("--unit_bytes", s.unit_bytes, "bytes of a unit's parameters, rounded to whole matrices",
        {Mode::units, Mode::sweep});
  number("--width", s.width, "width of the square matrices", 16, 16384, products);
  number("--rows", s.rows, "rows of a rank's activations", 1, 1 << 20, products);
  app.add_flag("--sweep", sweep,
               "measure the engine for several unit sizes and prefetch depths, with units * unit_bytes of parameters");

  int const rank = launched_rank();
  try {
    app.parse(argc, argv);
    s.mode = sweep ? Mode::sweep : !overlap ? Mode::table : units->count() > 0 ? Mode::units : Mode::overlap;
    for (auto const& [option, modes] : scopes)
      require(option->count() == 0 || std::find(modes.begin(), modes.end(), s.mode) != modes.end(),
              fmt::format("{} has no effect in {}; leave it out", option->get_name(), name(s.mode)));
    check_together(s, ranks->count() > 0);
  } catch (CLI::CallForHelp const&) {
    if (rank == 0) std::fputs(app.help().c_str(), stdout);
    return 0;
  } catch (CLI::ParseError const& error) {
    if (rank == 0) fmt::print(stderr, "collectives: {}\n(--help lists the flags)\n", error.what());
    return 2;
  }
  return -1;
}

}  // namespace bench
