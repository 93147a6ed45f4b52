// SPDX-License-Identifier: Apache-2.0
// The main function of test programs that run under mpirun: every rank runs every test; rank 0 reports success, any
// rank reports failure, and the program fails on all ranks if a test failed on one.
#include "fsdp/detail/mpi/environment.hpp"

#include <cstdlib>
#include <iostream>
#include <streambuf>
#include <string>
#include <vector>

#include "tests/mpi_main.hpp"
#include "tests/run_catch.hpp"

namespace {

/// Passes failures on at once, whole lines, to stderr. Says nothing about success.
class FailuresOnly : public std::streambuf {
 public:
  explicit FailuresOnly(int rank) : prefix_("rank " + std::to_string(rank) + ": ") {}

 private:
  int_type overflow(int_type c) override {
    if (c == traits_type::eof()) return 0;
    line_ += traits_type::to_char_type(c);
    if (line_.back() == '\n') {
      if (line_ != "\n" && !speaks_of_success()) fsdp::mpi::detail::write_error(prefix_ + line_);
      line_.clear();
    }
    return c;
  }

  bool speaks_of_success() const {
    for (auto const* text : {"All tests passed", "Passed all", "No tests ran", "RNG seed", "Filters:", "test cases:"})
      if (line_.find(text) != std::string::npos) return true;
    return false;
  }

  std::string prefix_;
  std::string line_;
};

fsdp::mpi::Environment* started = nullptr;

}  // namespace

fsdp::mpi::Environment& test_environment() { return *started; }

int main(int argc, char** argv) {
  ::setenv("FSDP_TIMEOUT", "60", 0);  // a rank that fails a test leaves its peers waiting
  fsdp::mpi::Environment environment(argc, argv);
  started = &environment;
  FailuresOnly failures(environment.rank());
  auto* const shown = std::cout.rdbuf();
  std::vector<char const*> arguments(argv, argv + argc);
  if (environment.rank() != 0) {
    std::cout.rdbuf(&failures);
    arguments.insert(arguments.end(), {"--reporter", "compact"});
  }
  int const failed = run_catch(static_cast<int>(arguments.size()), arguments.data());
  std::cout.rdbuf(shown);
  fsdp::mpi::detail::deferred_failure().forget();  // tests in which streams fail have judged that themselves
  int const own = failed != 0 ? 1 : 0;
  int any = own;
  MPI_Allreduce(&own, &any, 1, MPI_INT, MPI_MAX, MPI_COMM_WORLD);
  if (any != 0 && environment.rank() == 0 && own == 0) std::cerr << "a test failed on another rank\n";
  return any;
}
