// SPDX-License-Identifier: Apache-2.0
// How many threads a rank gets: affinity, control groups and the ranks beside it.
// skip-tsan
#include "transformer/launch/cores.cpp"  // NOLINT: tests what the program is made of

#include <sched.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <utility>
#include <vector>

#include "tests/catch.hpp"
#include "tests/support/in_child.hpp"

namespace {

using namespace transformer;
using Cores = std::vector<std::vector<int>>;

/// A root with files of its own.
class Root {
 public:
  explicit Root(std::vector<std::pair<std::string, std::string>> const& files) {
    std::string name = (fs::temp_directory_path() / "fsdp-cores-XXXXXX").string();
    REQUIRE(::mkdtemp(name.data()) != nullptr);
    path_ = name;
    for (auto const& [file, text] : files) {
      fs::create_directories((path_ / file).parent_path());
      std::ofstream(path_ / file) << text << '\n';
    }
  }
  Root(Root const&) = delete;
  Root& operator=(Root const&) = delete;
  ~Root() { fs::remove_all(path_); }
  std::optional<double> quota() const { return processor_quota(path_); }

 private:
  fs::path path_;
};

}  // namespace

TEST_CASE("cores that several ranks may run on are divided over them", "[nanogpt]") {
  CHECK(part_of_cores({{0, 1, 2, 3}}, 0, std::nullopt) == 4);
  Cores const unbound(3, {0, 1, 2, 3, 4, 5, 6, 7});
  for (std::size_t rank = 0; rank < 3; ++rank) CHECK(part_of_cores(unbound, rank, std::nullopt) == 2);
  CHECK(part_of_cores(Cores(3, {0, 1, 2}), 1, std::nullopt) == 1);
  CHECK(part_of_cores(Cores(4, {0, 1}), 3, std::nullopt) == 1);  // at least one
  // Bound by mpirun: to a core each, to a socket each, two to one.
  CHECK(part_of_cores({{0}, {1}, {2}}, 1, std::nullopt) == 1);
  CHECK(part_of_cores({{0, 1, 2, 3}, {4, 5, 6, 7}}, 1, std::nullopt) == 4);
  CHECK(part_of_cores({{0, 1, 2, 3}, {4, 5, 6, 7}, {4, 5, 6, 7}}, 2, std::nullopt) == 2);
  CHECK(part_of_cores({{0, 1, 2, 3}, {4, 5, 6, 7}, {4, 5, 6, 7}}, 0, std::nullopt) == 4);
}

TEST_CASE("a quota of processor time bounds the threads of all ranks together", "[nanogpt]") {
  Cores const one{{0, 1, 2, 3, 4, 5, 6, 7}};
  CHECK(part_of_cores(one, 0, 3.0) == 3);
  CHECK(part_of_cores(one, 0, 2.5) == 2);
  CHECK(part_of_cores(one, 0, 0.5) == 1);
  CHECK(part_of_cores(one, 0, 100.0) == 8);
  CHECK(part_of_cores({one[0], one[0]}, 1, 6.0) == 3);
}

TEST_CASE("quotas are found in control groups of both versions, and the least holds", "[nanogpt]") {
  CHECK(!Root({}).quota());
  CHECK(!Root({{"proc/self/cgroup", "0::/"}, {"sys/fs/cgroup/cpu.max", "max 100000"}}).quota());
  CHECK(Root({{"proc/self/cgroup", "0::/"}, {"sys/fs/cgroup/cpu.max", "150000 100000"}}).quota() == 1.5);
  CHECK(Root({{"proc/self/cgroup", "0::/a/b"},
              {"sys/fs/cgroup/a/cpu.max", "200000 100000"},
              {"sys/fs/cgroup/a/b/cpu.max", "800000 100000"}})
            .quota() == 2.0);
  // Inside a container the path may be the host's.
  CHECK(Root({{"proc/self/cgroup", "0::/docker/1234"}, {"sys/fs/cgroup/cpu.max", "300000 100000"}}).quota() == 3.0);
  CHECK(Root({{"proc/self/cgroup", "5:memory:/m\n4:cpu,cpuacct:/a\n0::/"},
              {"sys/fs/cgroup/cpu/a/cpu.cfs_quota_us", "50000"},
              {"sys/fs/cgroup/cpu/a/cpu.cfs_period_us", "100000"}})
            .quota() == 0.5);
  CHECK(!Root({{"proc/self/cgroup", "4:cpu,cpuacct:/"},
               {"sys/fs/cgroup/cpu/cpu.cfs_quota_us", "-1"},
               {"sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000"}})
             .quota());
  for (char const* const broken : {"", "nonsense", "1000", "0 0", "100000 0"}) {
    CAPTURE(broken);
    CHECK(!Root({{"proc/self/cgroup", "0::/"}, {"sys/fs/cgroup/cpu.max", broken}}).quota());
  }
}

TEST_CASE("a process sees the cores that it may run on", "[nanogpt]") {
  auto const all = allowed_cores();
  REQUIRE(!all.empty());
  auto const outcome = fsdp::testing::in_child([&] {
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(static_cast<std::size_t>(all.back()), &one);
    bool const bound = ::sched_setaffinity(0, sizeof one, &one) == 0;
    if (bound && allowed_cores() != std::vector<int>{all.back()}) std::_Exit(1);
  });
  CHECK(outcome.code == 0);
}
