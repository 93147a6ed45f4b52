// SPDX-License-Identifier: Apache-2.0
// nanogpt's launcher, without MPI and GPUs: who started a process, how its ranks come about, which GPU it takes.
// skip-sanitizers
// links: transformer_data
#include "transformer/launch/environment.cpp"  // NOLINT: tests what the program is made of

#include <fmt/format.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "tests/catch.hpp"
#include "tests/support/in_child.hpp"
#include "tests/support/messages.hpp"
#include "transformer/launch/refusals.hpp"

namespace {

using namespace transformer;
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

std::string refusal(Variables const& variables, Build build, std::string_view device, std::int64_t ranks = 1,
                    std::string_view comm = "auto") {
  return what([&] { static_cast<void>(choose_world(read_launch(variables), build, device, ranks, comm)); });
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
            "RANK=2: expected a number below WORLD_SIZE=2"));
  CHECK(has(what([] { read_launch({{"RANK", "0"}}); }), "WORLD_SIZE is not set"));
  CHECK(has(what([] { read_launch({{"WORLD_SIZE", "2"}}); }), "RANK is not set"));
  CHECK_FALSE(read_launch(open_mpi + Variables{{"RANK", "0"}}).named);  // MPI's launcher has said it all

  CHECK(read_launch(open_mpi + torchrun).several());  // they agree
  for (auto const& other :
       {Variables{{"RANK", "2"}, {"WORLD_SIZE", "4"}}, Variables{{"RANK", "1"}, {"WORLD_SIZE", "8"}}})
    CHECK(has(what([&] { read_launch(open_mpi + other); }), "but mpirun says rank 1 of 4; unset RANK and WORLD_SIZE"));
  CHECK(read_launch(pmix + torchrun).several());
  CHECK(has(what([] {
              read_launch(pmix + Variables{{"RANK", "2"}, {"WORLD_SIZE", "4"}});
            }),
            "rank 1 of an unknown number"));
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
    CHECK(has(refusal(torchrun, build, "cpu"), "rank 1 of 4, which works with --device=cuda only"));
    CHECK(has(refusal(torchrun + srun, build, "cpu"), "works with --device=cuda only; on the host use mpirun"));
  }
  for (auto const build : {with_nccl, with_none}) {
    for (auto const& variables : {open_mpi, pmi, pmix, srun, open_mpi + torchrun})
      CHECK(has(refusal(variables, build, "cpu"), "built without MPI, so it cannot be one of several processes"));
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

TEST_CASE("what moves data goes with device and launcher, or a sentence says what to do") {
  Variables const mpi_alone{{"OMPI_COMM_WORLD_RANK", "0"}, {"OMPI_COMM_WORLD_SIZE", "1"}};
  Variables const named_alone{{"RANK", "0"}, {"WORLD_SIZE", "1"}};
  struct Row {
    char const* device;
    Variables variables;
    char const *automatic, *local, *mpi, *nccl;  // the world that there is, or words of the sentence
  };
  char const *const threads = "threads", *const mpi = "mpi", *const by_mpi = "nccl_by_mpi",
                    *const by_names = "by names";
  char const* const on_gpus = "nccl connects GPUs, but the device is cpu; expected --device=cuda";
  char const* const on_host =
      "mpi connects processes on the host, but the device is cuda; expected --comm=nccl for processes with GPUs, or "
      "--device=cpu";
  char const* const start_mpi = "mpi connects processes; start them with mpirun -n N or srun, or use local";
  char const* const start_nccl =
      "nccl connects processes with one GPU each; start them with mpirun -n N, srun or torchrun";
  char const* const by_mpirun = "works with --device=cuda only; on the host use mpirun";
  std::vector<Row> const table{
      {"cpu", {}, threads, threads, start_mpi, on_gpus},
      {"cpu", batch_script, threads, threads, start_mpi, on_gpus},
      {"cpu", named_alone, threads, threads, start_mpi, on_gpus},
      {"cpu", mpi_alone, mpi, threads, mpi, on_gpus},
      {"cpu", open_mpi, mpi,
       "but mpirun has started several processes; expected --comm=mpi, or --ranks=N without mpirun", mpi, on_gpus},
      {"cpu", pmix, mpi, "but mpirun has started several processes; expected --comm=mpi, or --ranks=N without mpirun",
       mpi, on_gpus},
      {"cpu", srun, mpi, "but srun has started several processes; expected --comm=mpi, or --ranks=N without srun", mpi,
       on_gpus},
      {"cpu", torchrun, by_mpirun,
       "but torchrun has started several processes; expected --comm=mpi, or --ranks=N without torchrun", by_mpirun,
       on_gpus},
      {"cuda", {}, threads, threads, on_host, start_nccl},
      {"cuda", batch_script, threads, threads, on_host, start_nccl},
      {"cuda", named_alone, threads, threads, on_host, by_names},
      {"cuda", mpi_alone, threads, threads, on_host, by_mpi},
      {"cuda", open_mpi, by_mpi,
       "but mpirun has started several processes; expected --comm=nccl, or --ranks=N without mpirun", on_host, by_mpi},
      {"cuda", pmix, by_mpi,
       "but mpirun has started several processes; expected --comm=nccl, or --ranks=N without mpirun", on_host, by_mpi},
      {"cuda", srun, by_mpi, "but srun has started several processes; expected --comm=nccl, or --ranks=N without srun",
       on_host, by_mpi},
      {"cuda", torchrun, by_names,
       "but torchrun has started several processes; expected --comm=nccl, or --ranks=N without torchrun", on_host,
       by_names},
  };
  std::map<WorldKind, std::string> const words{{WorldKind::threads, threads},
                                               {WorldKind::mpi, mpi},
                                               {WorldKind::nccl_by_mpi, by_mpi},
                                               {WorldKind::nccl_by_variables, by_names}};
  for (auto const& row : table) {
    for (auto const& [comm, expected] : {std::pair("auto", row.automatic), std::pair("local", row.local),
                                         std::pair("mpi", row.mpi), std::pair("nccl", row.nccl)}) {
      std::string got;
      auto const message = what(
          [&, of = comm] { got = words.at(choose_world(read_launch(row.variables), with_all, row.device, 1, of)); });
      INFO(row.device << ", " << row.variables.size() << " variables, --comm=" << comm << ": " << got << message);
      CHECK((got.empty() ? has(message, expected) : got == expected));
      if (got.empty() && comm != std::string("auto") && row.automatic != by_mpirun)
        CHECK(has(message, "setting 'comm': "));
    }
  }
  // A feature that was not built in is reported as without the setting.
  CHECK(has(refusal(open_mpi, with_mpi, "cuda", 1, "nccl"), "built without NCCL"));
  CHECK(has(refusal(mpi_alone, with_nccl, "cuda", 1, "nccl"), "built without MPI"));
  CHECK(has(refusal(open_mpi, with_none, "cpu", 1, "mpi"), "built without MPI"));
  CHECK(has(refusal(open_mpi, with_all, "cpu", 2, "local"), "setting 'ranks': expected 1 under mpirun"));
}

TEST_CASE("runs say how their ranks came about") {
  CHECK(describe(WorldKind::threads, 1) == "one process");
  CHECK(describe(WorldKind::threads, 2) == "2 threads of one process");
  CHECK(describe(WorldKind::mpi, 1) == "1 process (MPI)");
  CHECK(describe(WorldKind::mpi, 2) == "2 processes (MPI)");
  CHECK(describe(WorldKind::nccl_by_mpi, 1) == "1 process with a GPU (NCCL, started by MPI)");
  CHECK(describe(WorldKind::nccl_by_mpi, 8) == "8 processes with a GPU each (NCCL, started by MPI)");
  CHECK(describe(WorldKind::nccl_by_variables, 8) ==
        "8 processes with a GPU each (NCCL, started by RANK and WORLD_SIZE)");
  CHECK(describe(WorldKind::nccl_by_mpi, 8, 3) == "8 processes that share 3 GPUs (NCCL, started by MPI)");
  CHECK(describe(WorldKind::nccl_by_variables, 2, 1) ==
        "2 processes that share 1 GPU (NCCL, started by RANK and WORLD_SIZE)");
}

TEST_CASE("one process of those that a launcher has started does what takes one") {
  CHECK(is_first_process({}));
  CHECK(is_first_process(batch_script));
  for (auto const& variables : {open_mpi, pmi, pmix, torchrun, srun}) CHECK_FALSE(is_first_process(variables));
  Variables const first{{"RANK", "0"}, {"WORLD_SIZE", "4"}};
  CHECK(is_first_process(first));
  CHECK(is_first_process(first + srun));  // its agent is the second task of a step
  CHECK_FALSE(is_first_process(torchrun + batch_script));
  CHECK_FALSE(is_first_process(open_mpi + first));
  CHECK(is_first_process({{"RANK", "3"}}));  // nobody's
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
  CHECK(has(problem(srun, 1), "srun has started 4 processes, but MPI finds 1: start srun with an MPI plugin"));
}

TEST_CASE("ranks count themselves machine by machine, however they lie") {
  std::vector<int> const nodes{0, 1, 0, 1, 0, 5};
  std::vector<std::pair<int, int>> const expected{{0, 3}, {0, 2}, {1, 3}, {1, 2}, {2, 3}, {0, 1}};
  for (int rank = 0; rank < 6; ++rank) {
    auto const here = local_place(nodes, rank);
    CHECK(std::pair(here.rank, here.size) == expected[static_cast<std::size_t>(rank)]);
  }
}

TEST_CASE("machines are told apart by their names") {
  CHECK(nodes_of({"a", "b", "a", "c", "b"}) == std::vector<int>{0, 1, 0, 3, 1});
  CHECK(nodes_of({}).empty());
}

TEST_CASE("shard groups of a machine each are as many consecutive ranks on every machine") {
  CHECK(ranks_of_a_machine({0}) == 0);
  CHECK(ranks_of_a_machine({0, 0, 0, 0}) == 0);
  CHECK(ranks_of_a_machine({0, 0, 2, 2}) == 2);
  CHECK(ranks_of_a_machine({3, 3, 3, 0, 0, 0}) == 3);
  CHECK(ranks_of_a_machine({0, 1, 2}) == 1);
  auto const problem = [](std::vector<int> const& nodes) {
    return what([&] { static_cast<void>(ranks_of_a_machine(nodes)); });
  };
  CHECK(
      has(problem({0, 0, 2}),
          "the number of ranks differs: 2 on the machine of rank 0, 1 on the machine of rank 2; start the same number "
          "of consecutive ranks on each machine"));
  CHECK(has(problem({0, 1, 1, 1}), "1 on the machine of rank 0, 3 on the machine of rank 1; start"));
  CHECK(has(problem({0, 1, 0, 1}), "ranks 0 and 2 are on one machine and ranks between them are on another"));
  CHECK(has(problem({0, 0, 2, 2, 4, 0, 4, 2}), "or choose a size with --shard_group=N"));
}

TEST_CASE("every rank takes the GPU of its place on the machine") {
  for (int place = 0; place < 4; ++place) {
    for (bool const share : {false, true}) {
      CHECK(choose_gpu({8 + place, 12}, {place, 4}, 4, share) == place);
      CHECK(choose_gpu({8 + place, 12}, {place, 4}, 8, share) == place);
      CHECK(choose_gpu({8 + place, 12}, {place, 0}, 4, share) == place);  // LOCAL_RANK does not say how many there are
      CHECK(choose_gpu({8 + place, 12}, {place, 4}, 1, share) == 0);      // the launcher shows each rank one
    }
    CHECK(choose_gpu({8 + place, 12}, {place, 4}, 3, true) == place % 3);  // dealt round
    CHECK(choose_gpu({8 + place, 12}, {place, 0}, 2, true) == place % 2);
  }
  CHECK(choose_gpu({3, 4}, {}, 1, false) == 0);
  CHECK(choose_gpu({0, 1}, {}, 8, false) == 0);
}

TEST_CASE("fewer GPUs than ranks of a machine are refused on all of them") {
  auto const problem = [](Place rank, LocalPlace here, int gpus) {
    return what([&] { choose_gpu(rank, here, gpus, false); });
  };
  for (int place = 0; place < 4; ++place)
    CHECK(has(problem({8 + place, 12}, {place, 4}, 3),
              fmt::format("rank {}: expected a GPU for every rank, got 4 ranks on a machine with 3 GPUs; "
                          "--share_gpu=true lets several ranks share a GPU",
                          8 + place)));
  CHECK(has(problem({7, 8}, {3, 0}, 3),
            "rank 7: expected a GPU for every rank, got LOCAL_RANK=3 on a machine with 3 GPUs; --share_gpu=true"));
  CHECK(has(problem({7, 8}, {3, 2}, 3),  // enough GPUs: the variable is wrong
            "rank 7: expected a GPU for every rank, got LOCAL_RANK=3 on a machine with 3 GPUs and 2 ranks; "));
  CHECK(has(problem({1, 2}, {}, 2), "rank 1: LOCAL_RANK is not set, and there are 2 GPUs to choose from"));
  CHECK(has(problem({1, 2}, {0, 1}, 0), "found none on this machine"));
  for (int const gpus : {0, 2})  // sharing makes no GPU, and tells ranks no place
    CHECK(has(what([&] {
                choose_gpu({1, 2}, {}, gpus, true);
              }),
              gpus == 0 ? "found none on this machine" : "LOCAL_RANK is not set"));
}

TEST_CASE("ranks that were shown one GPU notice it") {
  auto const problem = [](std::string const& names, std::vector<int> const& nodes) {
    std::vector<ChosenGpu> gpus;
    for (char const name : names) gpus.push_back({std::string(1, name), static_cast<int>(gpus.size()), 1});
    return what([&] { expect_own_gpus(gpus, nodes); });
  };
  CHECK(problem("abc", {0, 0, 2}) == "nothing was thrown");
  auto const some = problem("abcdc", {0, 0, 2, 2, 2});
  CHECK(has(some,
            "ranks 2 and 4 have the same one (c), and each of them sees this GPU alone: the 3 ranks of their machine "
            "see 2 GPUs in total"));
  CHECK(has(some, "--share_gpu=true"));
  CHECK(has(problem("aa", {0, 0}),
            "ranks 0 and 1 have the same one (a), and each of them sees this GPU alone: the 2 ranks of their machine "
            "see 1 GPU in total"));
}

TEST_CASE("ranks that were given one GPU of several are told by which variable") {
  auto const problem = [](ChosenGpu const& first, ChosenGpu const& second) {
    return what([&] { expect_own_gpus({first, second}, {0, 0}); });
  };
  auto const twice = problem({"a", 0, 4}, {"a", 0, 4});
  CHECK(has(twice,
            "ranks 0 and 1 have the same one (a): both have LOCAL_RANK=0; expected a different number for each rank"));
  CHECK_FALSE(has(twice, "start fewer"));  // there are GPUs enough
  auto const shifted = problem({"b", 1, 4}, {"b", 0, 2});
  CHECK(has(shifted,
            "rank 0 has LOCAL_RANK=1 and sees 4 GPUs, rank 1 has LOCAL_RANK=0 and sees 2: set the same "
            "CUDA_VISIBLE_DEVICES"));
  for (auto const* const name : {"GPU-0a", "GPU-0a of a host with spaces"}) {
    auto const same = unpack_gpu(pack({name, -1, 8}));
    CHECK(same.name == name);
    CHECK((same.place == -1 && same.seen == 8));
  }
}

TEST_CASE("what all ranks refuse is said by rank 0, and by those who are told to") {
  auto const said = [](int rank, bool told) {
    Job job;
    job.says_refusals = told;
    auto const outcome = fsdp::testing::in_child([&] { std::_Exit(refuse(rank, job, "no GPU here")); });
    CHECK(outcome.code == usage_error);
    return outcome.text;
  };
  CHECK(said(0, false) == "nanogpt: error: no GPU here\n");
  CHECK(said(1, false) == "");
  CHECK(said(4, true) == "nanogpt: error: no GPU here\n");
}

TEST_CASE("NCCL takes ranks that share a GPU for machines of their own, and no others") {
  std::vector<std::string> const gpus{"a", "b", "a", "c", "a"};
  std::set<std::string> hosts;
  for (int const rank : {0, 2, 4}) hosts.insert(nccl_host(gpus, rank));
  CHECK(hosts.size() == 3);
  CHECK_FALSE(hosts.contains(""));
  CHECK(nccl_host(gpus, 1).empty());
  CHECK(nccl_host(gpus, 3).empty());
}

TEST_CASE("an exception that nothing catches is said before any stack is unwound, and ends the process") {
  struct Loud {
    ~Loud() { std::fputs("unwound\n", stderr); }
  };
  for (std::string const text : {"the disk is full", "rank 3: the disk is full", "rank 3 of 4: it", "rank 31: it"}) {
    auto const outcome = fsdp::testing::in_child([&] {
      end_on_uncaught_exceptions(3);
      std::thread([&] {  // below a test's own frames, which catch
        Loud const stream;
        throw fsdp::Error(text);
      })
          .join();
    });
    CHECK(outcome.code == EXIT_FAILURE);
    bool const named = text.starts_with("rank 3:") || text.starts_with("rank 3 of");
    CHECK(outcome.text == fmt::format("nanogpt: error: {}{}\n", named ? "" : "rank 3: ", text));
  }
}

TEST_CASE("an exception that comes of a wait that ends the process does not take its place") {
  auto const outcome = fsdp::testing::in_child([&] {
    end_on_uncaught_exceptions(3);
    fsdp::host::detail::giving_up.store(true);
    std::thread([] { throw fsdp::Error("a loss that is not a number"); }).detach();
    std::this_thread::sleep_for(std::chrono::milliseconds(300));
    std::_Exit(fsdp::host::wait_expired_exit_code);
  });
  CHECK(outcome.code == fsdp::host::wait_expired_exit_code);
  CHECK(outcome.text == "");
}

TEST_CASE("ranks that would compute on different devices end alike") {
  Job job;
  job.device = "cuda";
  job.dtype = "bfloat16";
  Peers alike{{"cuda in bfloat16", "cuda in bfloat16"}};
  CHECK(what([&] { expect_same_device(alike, job); }) == "nothing was thrown");
  Peers mixed{{"cuda in bfloat16", "cuda in bfloat16", "cpu in float32", "cpu in float32"}};
  CHECK(has(what([&] { expect_same_device(mixed, job); }), "rank 0 uses cuda in bfloat16, rank 2 uses cpu in float32"));
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
