// SPDX-License-Identifier: Apache-2.0
// nanogpt's launcher, without MPI and GPUs: who started a process, how its ranks come about, which GPU it takes.
// skip-tsan
#include "launch.cpp"  // NOLINT: tests what the program is made of

#include <fmt/format.h>

#include <string>
#include <utility>
#include <vector>

#include "agreement.hpp"
#include "tests/catch.hpp"
#include "tests/support/messages.hpp"

namespace {

using namespace nanogpt;
using fsdp::testing::has;
using fsdp::testing::what;

constexpr Build with_all{true, true}, with_mpi{true, false}, with_nccl{false, true}, with_none{};

Variables const open_mpi{{"OMPI_COMM_WORLD_RANK", "1"}, {"OMPI_COMM_WORLD_SIZE", "4"}};
Variables const pmi{{"PMI_RANK", "1"}, {"PMI_SIZE", "4"}};
Variables const pmix{{"PMIX_RANK", "1"}};
Variables const torchrun{{"RANK", "1"}, {"WORLD_SIZE", "4"}};
Variables const srun{{"SLURM_PROCID", "1"}, {"SLURM_STEP_NUM_TASKS", "4"}};
Variables const batch_script{{"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "4"}};

Variables operator+(Variables left, Variables const& right) {
  left.insert(right.begin(), right.end());
  return left;
}

std::string refusal(Variables const& variables, Build build, std::string_view device, std::int64_t ranks = 1) {
  return what([&] { static_cast<void>(choose_world(read_launch(variables), build, device, ranks)); });
}

WorldKind chosen(Variables const& variables, Build build, std::string_view device, std::int64_t ranks = 1) {
  return choose_world(read_launch(variables), build, device, ranks);
}

void check_place(std::optional<Place> const& place, int rank, int size) {
  REQUIRE(place.has_value());
  CHECK(place->rank == rank);
  CHECK(place->size == size);
}

/// The world of a rank whose peers say these texts.
struct Peers {
  std::vector<std::string> texts;
  std::vector<std::string> exchange(std::string const&, std::string_view) const { return texts; }
};

}  // namespace

TEST_CASE("variables say who started a process, and its place") {
  auto const plain = read_launch({});
  CHECK_FALSE((plain.mpi || plain.named || plain.step || plain.several()));
  CHECK_FALSE(read_launch({{"OMPI_COMM_WORLD_SIZE", ""}, {"WORLD_SIZE", ""}}).several());

  check_place(read_launch(open_mpi).mpi, 1, 4);
  check_place(read_launch(pmi).mpi, 1, 4);
  check_place(read_launch(open_mpi + Variables{{"PMI_RANK", "0"}, {"PMI_SIZE", "1"}, {"PMIX_RANK", "0"}}).mpi, 1, 4);
  check_place(read_launch(pmix).mpi, 1, 0);
  check_place(read_launch(torchrun).named, 1, 4);
  check_place(read_launch(srun).step, 1, 4);
  for (auto const& variables : {open_mpi, pmi, pmix, torchrun, srun}) CHECK(read_launch(variables).several());

  // A batch script is no task of a step, whatever Slurm says of its job.
  CHECK_FALSE(read_launch(batch_script).several());
  CHECK_FALSE(read_launch(batch_script).step);
  CHECK_FALSE(read_launch({{"SLURM_PROCID", "0"}, {"SLURM_STEP_NUM_TASKS", "1"}}).several());
  // Daemons of mpirun and torchrun's agents may be tasks of a step: what they start is not.
  CHECK_FALSE(read_launch(srun + Variables{{"RANK", "0"}, {"WORLD_SIZE", "1"}}).several());
  CHECK_FALSE(read_launch(srun + Variables{{"OMPI_COMM_WORLD_RANK", "0"}, {"OMPI_COMM_WORLD_SIZE", "1"}}).several());
}

TEST_CASE("variables that are malformed, half there or contradict each other are refused by name") {
  CHECK(has(what([] {
              read_launch({{"WORLD_SIZE", "four"}, {"RANK", "0"}});
            }),
            "WORLD_SIZE='four': expected a whole number from 1 to 2147483647"));
  CHECK(has(what([] { read_launch({{"WORLD_SIZE", "0"}, {"RANK", "0"}}); }), "WORLD_SIZE='0'"));
  CHECK(has(what([] { read_launch({{"WORLD_SIZE", "2x"}, {"RANK", "0"}}); }), "WORLD_SIZE='2x'"));
  CHECK(has(what([] { read_launch({{"WORLD_SIZE", "2"}, {"RANK", "-1"}}); }), "RANK='-1'"));
  CHECK(has(what([] {
              read_launch({{"WORLD_SIZE", "2"}, {"RANK", "2"}});
            }),
            "RANK=2: expected less than WORLD_SIZE, 2"));
  CHECK(has(what([] { read_launch({{"RANK", "0"}}); }), "WORLD_SIZE is not set"));
  CHECK(has(what([] { read_launch({{"WORLD_SIZE", "2"}}); }), "RANK is not set"));
  CHECK_FALSE(read_launch(open_mpi + Variables{{"RANK", "0"}}).named);  // MPI's launcher has said it all

  CHECK(read_launch(open_mpi + torchrun).several());  // they agree
  for (auto const& other :
       {Variables{{"RANK", "2"}, {"WORLD_SIZE", "4"}}, Variables{{"RANK", "1"}, {"WORLD_SIZE", "8"}}})
    CHECK(has(what([&] { read_launch(open_mpi + other); }), "and mpirun says rank 1 of 4: unset RANK and WORLD_SIZE"));
  CHECK(read_launch(pmix + torchrun).several());
  CHECK(has(what([] { read_launch(pmix + Variables{{"RANK", "2"}, {"WORLD_SIZE", "4"}}); }), "rank 1 of some"));
}

TEST_CASE("on the host processes are MPI's, or there is one") {
  for (auto const build : {with_all, with_mpi}) {
    for (auto const& variables : {open_mpi, pmi, pmix, srun, open_mpi + torchrun, open_mpi + srun})
      CHECK(chosen(variables, build, "cpu") == WorldKind::mpi);
    CHECK(chosen({{"OMPI_COMM_WORLD_SIZE", "1"}}, build, "cpu") == WorldKind::mpi);
  }
  for (auto const build : {with_all, with_mpi, with_nccl, with_none}) {
    CHECK(chosen({}, build, "cpu", 3) == WorldKind::threads);
    CHECK(chosen({{"RANK", "0"}, {"WORLD_SIZE", "1"}}, build, "cpu", 3) == WorldKind::threads);
    CHECK(chosen(batch_script, build, "cpu", 3) == WorldKind::threads);
    CHECK(has(refusal(torchrun, build, "cpu"), "rank 1 of 4, but processes on the host are started by mpirun"));
    CHECK(has(refusal(torchrun + srun, build, "cpu"), "processes on the host are started by mpirun"));
  }
  for (auto const build : {with_nccl, with_none}) {
    for (auto const& variables : {open_mpi, pmi, pmix, srun, open_mpi + torchrun})
      CHECK(has(refusal(variables, build, "cpu"), "built without MPI and cannot be one of several ranks"));
    CHECK(chosen({{"OMPI_COMM_WORLD_RANK", "0"}, {"OMPI_COMM_WORLD_SIZE", "1"}}, build, "cpu") == WorldKind::threads);
  }
}

TEST_CASE("processes with GPUs find each other by MPI, or by torchrun's variables; alone they need neither") {
  for (auto const& variables : {open_mpi, pmi, pmix, srun, open_mpi + torchrun, open_mpi + srun})
    CHECK(chosen(variables, with_all, "cuda") == WorldKind::nccl_by_mpi);
  for (auto const build : {with_all, with_nccl})
    for (auto const& variables : {torchrun, torchrun + srun})
      CHECK(chosen(variables, build, "cuda") == WorldKind::nccl_by_variables);
  CHECK(chosen(open_mpi + torchrun, with_nccl, "cuda") == WorldKind::nccl_by_variables);
  for (auto const& variables : {open_mpi, pmi, pmix, srun}) {
    auto const message = refusal(variables, with_nccl, "cuda");
    CHECK(has(message, "built without MPI"));
    for (char const* const name : {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"})
      CHECK(has(message, name));
  }
  CHECK(has(refusal(srun, with_nccl, "cuda"), "the processes of srun"));
  CHECK(has(refusal(pmi, with_nccl, "cuda"), "the processes of mpirun"));
  for (auto const build : {with_mpi, with_none})
    for (auto const& variables : {open_mpi, torchrun, srun})
      CHECK(has(refusal(variables, build, "cuda"), "built without NCCL"));
  for (auto const build : {with_all, with_mpi, with_nccl, with_none}) {
    CHECK(chosen({}, build, "cuda", 3) == WorldKind::threads);
    CHECK(chosen(batch_script, build, "cuda", 3) == WorldKind::threads);
    CHECK(chosen({{"OMPI_COMM_WORLD_RANK", "0"}, {"OMPI_COMM_WORLD_SIZE", "1"}}, build, "cuda") == WorldKind::threads);
    CHECK(chosen({{"RANK", "0"}, {"WORLD_SIZE", "1"}}, build, "cuda") == WorldKind::threads);
  }
}

TEST_CASE("a process that is one of several runs no threads beside it") {
  auto const expected = [](std::string const& starter) {
    return "setting 'ranks': expected 1 under " + starter + ", which starts the ranks itself, got 2";
  };
  for (std::string_view const device : {"cpu", "cuda"}) {
    CHECK(has(refusal(open_mpi, with_all, device, 2), expected("mpirun")));
    CHECK(has(refusal({{"OMPI_COMM_WORLD_SIZE", "1"}}, with_all, device, 2), expected("mpirun")));
    CHECK(has(refusal(torchrun, with_all, device, 2), expected("torchrun")));
    CHECK(has(refusal(srun, with_all, device, 2), expected("srun")));
  }
}

TEST_CASE("runs say how their ranks came about") {
  CHECK(describe(WorldKind::threads, 1) == "one process");
  CHECK(describe(WorldKind::threads, 2) == "2 threads of one process");
  CHECK(describe(WorldKind::mpi, 1) == "1 process (MPI)");
  CHECK(describe(WorldKind::mpi, 2) == "2 processes (MPI)");
  CHECK(describe(WorldKind::nccl_by_mpi, 8) == "8 processes with a GPU each (NCCL, started by MPI)");
  CHECK(describe(WorldKind::nccl_by_variables, 8) ==
        "8 processes with a GPU each (NCCL, started by RANK and WORLD_SIZE)");
}

TEST_CASE("a launcher and an MPI that do not know each other are noticed") {
  auto const problem = [](Variables const& variables, int size) {
    return what([&] { expect_mpi_size(read_launch(variables), size); });
  };
  for (auto const& variables : {open_mpi, pmi, srun}) CHECK(problem(variables, 4) == "nothing was thrown");
  CHECK(problem(pmix, 7) == "nothing was thrown");
  CHECK(problem(pmix + srun, 7) == "nothing was thrown");  // a launcher of its own inside a step
  CHECK(problem(open_mpi + srun, 4) == "nothing was thrown");
  CHECK(has(problem(pmi, 1), "mpirun has started 4 processes, but MPI finds 1"));
  CHECK(has(problem(pmix + srun, 1), "srun has started 4 processes, but MPI finds 1"));
  CHECK(has(problem(srun, 1), "srun has started 4 processes, but MPI finds 1: expected an MPI plugin"));
}

TEST_CASE("ranks count themselves machine by machine, however they lie") {
  std::vector<int> const nodes{0, 1, 0, 1, 0, 5};
  std::vector<std::pair<int, int>> const expected{{0, 3}, {0, 2}, {1, 3}, {1, 2}, {2, 3}, {0, 1}};
  for (int rank = 0; rank < 6; ++rank) {
    auto const here = local_place(nodes, rank);
    CHECK(std::pair(here.rank, here.size) == expected[static_cast<std::size_t>(rank)]);
  }
}

TEST_CASE("every rank takes the GPU of its place on the machine") {
  for (int place = 0; place < 4; ++place) {
    CHECK(choose_gpu({8 + place, 12}, {place, 4}, 4) == place);
    CHECK(choose_gpu({8 + place, 12}, {place, 4}, 8) == place);
    CHECK(choose_gpu({8 + place, 12}, {place, 0}, 4) == place);  // LOCAL_RANK does not say how many there are
    CHECK(choose_gpu({8 + place, 12}, {place, 4}, 1) == 0);      // the launcher shows each rank one
  }
  CHECK(choose_gpu({3, 4}, {}, 1) == 0);
  CHECK(choose_gpu({0, 1}, {}, 8) == 0);
}

TEST_CASE("fewer GPUs than ranks of a machine are refused on all of them") {
  auto const problem = [](Place rank, LocalPlace here, int gpus) {
    return what([&] { choose_gpu(rank, here, gpus); });
  };
  for (int place = 0; place < 4; ++place)
    CHECK(has(problem({8 + place, 12}, {place, 4}, 3),
              fmt::format("rank {}: expected a GPU for every rank, got 4 ranks on a machine with 3 GPUs", 8 + place)));
  CHECK(has(problem({7, 8}, {3, 0}, 3),
            "rank 7: expected a GPU for every rank, got LOCAL_RANK 3 on a machine with 3 GPUs"));
  CHECK(has(problem({1, 2}, {}, 2), "rank 1: LOCAL_RANK is not set, and there are 2 GPUs to choose from"));
  CHECK(has(problem({1, 2}, {0, 1}, 0), "found none here"));
}

TEST_CASE("ranks that were shown one GPU notice it") {
  CHECK(what([] { expect_own_gpus({"a", "b", "c"}); }) == "nothing was thrown");
  CHECK(has(what([] { expect_own_gpus({"a", "b", "c", "b"}); }), "ranks 1 and 3 have the same one (b)"));
  CHECK(has(what([] { expect_own_gpus({"a", "a"}); }), "ranks 0 and 1"));
}

TEST_CASE("ranks that would compute on different devices end alike") {
  Job job;
  job.device = "cuda";
  job.dtype = "bfloat16";
  Peers alike{{"cuda in bfloat16", "cuda in bfloat16"}};
  CHECK(what([&] { expect_same_device(alike, job); }) == "nothing was thrown");
  Peers mixed{{"cuda in bfloat16", "cuda in bfloat16", "cpu in float32", "cpu in float32"}};
  CHECK(has(what([&] { expect_same_device(mixed, job); }), "rank 0 on cuda in bfloat16, rank 2 on cpu in float32"));
  CHECK_THROWS_AS(expect_same_device(mixed, job), AgreedError);
}

TEST_CASE("what one rank finds wrong ends all of them with its text") {
  Peers fine{{"", ""}};
  CHECK_NOTHROW(agree(fine, [] {}));
  Peers one{{"", "no GPU here", "nor here"}};
  CHECK(what([&] { agree(one, [] {}); }) == "no GPU here");
  CHECK_THROWS_AS(agree(one, [] {}), AgreedError);
}

TEST_CASE("variables are read from this process's environment") {
  REQUIRE(::setenv("PMIX_RANK", "3", 1) == 0);
  REQUIRE(::setenv("NANOGPT_OTHER", "3", 1) == 0);
  auto const variables = launch_variables();
  CHECK(variables.at("PMIX_RANK") == "3");
  CHECK_FALSE(variables.contains("NANOGPT_OTHER"));
  REQUIRE(::unsetenv("PMIX_RANK") == 0);
  CHECK_FALSE(launch_variables().contains("PMIX_RANK"));
}
