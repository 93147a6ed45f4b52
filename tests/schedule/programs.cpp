// SPDX-License-Identifier: Apache-2.0
// Programs of 5,000 declarations at random, and their plans of memory, are as recorded in every field. A change of the
// step compiler that is meant to change them records the new digest; `[dump]` prints all of them, for a comparison
// line by line.
// skip-sanitizers
#include <cstdint>
#include <cstdio>
#include <exception>
#include <random>
#include <string>

#include "fsdp/detail/step/compile_program.hpp"
#include "fsdp/detail/step/memory_plan.hpp"
#include "fsdp/tensor.hpp"
#include "tests/catch.hpp"
#include "tests/support/program_dump.hpp"
#include "tests/support/random_inputs.hpp"

namespace {

/// Calls `visit(text)` for each declaration.
template <class Visit>
void each_program(Visit const& visit) {
  std::mt19937 random(45);
  for (int trial = 0; trial < 5000; ++trial) {
    fsdp::MemoryPlanInput const input{fsdp::testing::input_with_paths_at_random(random, trial % 50 == 0 ? 40 : 6)};
    fsdp::testing::ProgramDump dump;
    try {
      dump.add(fsdp::compile_program(input));
      dump.add(fsdp::memory_plan(input));
    } catch (std::exception const& refusal) {
      dump.add(refusal.what());
    }
    visit(dump.text());
  }
}

}  // namespace

TEST_CASE("programs: 5,000 declarations give the recorded programs and plans") {
  std::uint64_t digest = 0;
  each_program([&](std::string const& text) { digest = 31 * digest + fsdp::hash_name(text); });
  CHECK(digest == 0xd2f9000f1eae8763);
}

TEST_CASE("programs: printed", "[.][dump]") {
  each_program([](std::string const& text) { std::puts(text.c_str()); });
}
