// SPDX-License-Identifier: Apache-2.0
// Snapshots in the memory of nodes: ranks are threads, a folder stands for a node's memory. A run goes on with the same
// bits after the loss of any node, on as many ranks or fewer; bad snapshots are skipped and named.
// needs: nlohmann_json xxHash
#include <sys/resource.h>
#include <sys/stat.h>

#include <algorithm>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "fsdp/detail/checkpoint/snapshot_search.hpp"
#include "fsdp/snapshots.hpp"
#include "tests/catch.hpp"
#include "tests/checkpoint/support.hpp"
#include "tests/support/messages.hpp"
#include "tests/support/rank_checks.hpp"
#include "tests/support/sanitized.hpp"
#include "tests/support/temporary_folder.hpp"

namespace {

using namespace fsdp::testing;
namespace fs = std::filesystem;
using fsdp::SnapshotPlace;
using Folder = TemporaryFolder;

/// Nodes by rank; each has a folder of its own.
using NodesOfRanks = std::vector<int>;
NodesOfRanks const two_nodes{0, 0, 1, 1};
/// ThreadSanitizer sees one kind of damage: the same threads read files of all kinds.
constexpr bool only_first = sanitized && has_thread_sanitizer;

SnapshotPlace place_of(Folder const& folder, int node, std::string build = "b") {
  return {folder.path / std::to_string(node), "out", std::move(build)};
}
void lose(Folder const& folder, int node) { fs::remove_all(folder.path / std::to_string(node)); }

/// Files of snapshots on a node whose names end with `ending`.
std::vector<fs::path> files_on(Folder const& folder, int node, std::string const& ending) {
  std::vector<fs::path> files;
  auto const root = folder.path / std::to_string(node);
  std::error_code error;
  for (auto const& entry : fs::recursive_directory_iterator(root, error))
    if (entry.path().string().ends_with(ending)) files.push_back(entry.path());
  std::sort(files.begin(), files.end());
  return files;
}
std::size_t snapshots_on(Folder const& folder, int node) {
  std::size_t count = 0;
  for (auto const& run : fs::directory_iterator(folder.path / std::to_string(node)))
    if (run.is_directory())
      for (auto const& step : fs::directory_iterator(run.path())) count += step.is_directory() ? 1U : 0U;
  return count;
}

Trial trial_on(std::size_t ranks, fsdp::ShardingStrategy strategy = fsdp::FullShard{}) {
  Trial trial;
  trial.ranks = static_cast<int>(ranks);
  trial.strategy = std::move(strategy);
  trial.shape = shape_for_any_world();
  return trial;
}

/// Trains, and takes a snapshot after each of `steps`. @return the states that were taken
std::vector<State> take(Folder const& folder, NodesOfRanks const& nodes, std::vector<int> const& steps,
                        fsdp::ShardingStrategy strategy = fsdp::FullShard{}, std::string const& build = "b") {
  std::vector<State> states;
  run<fsdp::Fp32>(trial_on(nodes.size(), std::move(strategy)), make_adamw,
                  [&](auto& engine, auto& network, auto& adamw) {
                    auto const place = place_of(folder, nodes[static_cast<std::size_t>(engine.rank())], build);
                    fsdp::Snapshots snapshots(engine, place);
                    int step = 0;
                    for (auto const next : steps) {
                      train(network, adamw, step, next);
                      step = next;
                      RANK_CHECK(snapshots.take(adamw, next, {{"step", next}}).begun);
                      RANK_CHECK(snapshots.wait().empty());
                      auto state = state_of(engine, adamw);
                      if (engine.rank() == 0) states.push_back(std::move(state));
                    }
                  });
  return states;
}

struct Resumed {
  int step = -1;  ///< -1: no snapshot
  State state;
  std::vector<std::string> notes;
};
/// Looks for a snapshot and loads it.
Resumed resume(Folder const& folder, NodesOfRanks const& nodes, fsdp::ShardingStrategy strategy = fsdp::FullShard{},
               std::string const& build = "b") {
  Resumed result;
  run<fsdp::Fp32>(trial_on(nodes.size(), std::move(strategy)), make_adamw,
                  [&](auto& engine, auto& network, auto& adamw) {
                    bool const first = engine.rank() == 0;
                    train(network, adamw, 20, 21);  // a state of its own, which is replaced
                    auto const place = place_of(folder, nodes[static_cast<std::size_t>(engine.rank())], build);
                    std::vector<std::string> notes;
                    auto const found = fsdp::find_snapshot(engine.world(), place, notes);
                    if (first) result.notes = notes;
                    if (!found) return;
                    auto const loaded = fsdp::load_snapshot(engine, adamw, *found);
                    auto state = state_of(engine, adamw);
                    if (!first) return;
                    result.state = std::move(state);
                    result.step = loaded.extra.at("step").template get<int>();
                    RANK_CHECK(loaded.step == result.step && found->step == result.step);
                  });
  return result;
}
std::string all(std::vector<std::string> const& notes) {
  std::string text;
  for (auto const& note : notes) text += note + "\n";
  return text;
}
void alter(fs::path const& path, std::streamoff from_end) {
  std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
  file.seekg(-from_end, std::ios::end);
  auto const at = file.tellg();
  char byte = 0;
  file.get(byte);
  file.seekp(at);
  file.put(static_cast<char>(byte ^ 1));
}

}  // namespace

TEST_CASE("a run goes on from a snapshot after the loss of any node, on 4, 3, 2 and 1 ranks") {
  auto const strategies = {fsdp::ShardingStrategy(fsdp::FullShard{}), fsdp::ShardingStrategy(fsdp::NoShard{}),
                           fsdp::ShardingStrategy(fsdp::HybridShard<>{.group = 2})};
  for (auto const& nodes : {two_nodes, NodesOfRanks{0, 1, 0, 1}, {0, 0, 0, 1}, {0, 1, 1, 2}, {0, 1, 2, 3}}) {
    for (auto const& strategy : strategies) {
      if (strategy.name != fsdp::FullShard{}.name && nodes != two_nodes) continue;
      int const count = *std::max_element(nodes.begin(), nodes.end()) + 1;
      for (int lost = 0; lost < count; ++lost) {
        if (!fsdp::testing::next_cell(5)) continue;
        Folder const folder;
        auto const wanted = take(folder, nodes, {2, 4}, strategy).back();
        lose(folder, lost);
        for (std::size_t ranks = 4; ranks > 0; --ranks) {
          // Fewer ranks: those of the nodes that are left, as far as they go, so that each of these nodes has one.
          NodesOfRanks left;
          for (int node = 0; node < count; ++node)
            if (node != lost) left.push_back(node);
          if (ranks < left.size()) continue;
          while (left.size() < ranks) left.push_back(ranks == 4 ? lost : left.front());
          auto const now = resume(folder, left,
                                  ranks == 3   ? fsdp::ShardingStrategy(fsdp::FullShard{})
                                  : ranks == 4 ? strategy
                                               : fsdp::ShardingStrategy(fsdp::NoShard{}));
          INFO(strategy.name << " of " << count << " nodes without " << lost << " on " << ranks << " ranks");
          CHECK(now.step == 4);
          CHECK((now.state == wanted));
          CHECK(all(now.notes) == "");
        }
      }
    }
  }
  CHECK_RANKS();
}

TEST_CASE("a node that is lost with its mirror leaves no snapshot, and that is said") {
  Folder const folder;
  take(folder, {0, 1, 2, 3}, {2});  // 0 and 1 mirror each other, 2 and 3 do
  lose(folder, 0);
  lose(folder, 2);
  CHECK(resume(folder, {1, 3}).step == 2);
  lose(folder, 1);
  auto const now = resume(folder, {1, 3});
  CHECK(now.step == -1);
  CHECK(has(all(now.notes), "the snapshot of step 2 is skipped: no node holds the slices of rank 0"));
  CHECK_RANKS();
}

TEST_CASE("slices that a node has fetched are held by it from then on") {
  Folder const folder;
  auto const wanted = take(folder, two_nodes, {2});
  lose(folder, 1);
  CHECK(resume(folder, two_nodes, fsdp::NoShard{}).step == 2);  // each rank needs all slices
  lose(folder, 0);
  auto const now = resume(folder, {1, 1});
  CHECK(now.step == 2);
  CHECK((now.state == wanted[0]));
  CHECK_RANKS();
}

TEST_CASE("slices that are cut, altered or missing are skipped and named, and the copy is taken") {
  auto const cut = [](fs::path const& path) { fs::resize_file(path, fs::file_size(path) - 1); };
  struct Fault {
    std::string ending;
    std::function<void(fs::path const&)> act;
    std::string said;
  };
  std::vector<Fault> const faults{
      {"rank-00001-of-00004.safetensors", cut, "bytes; expected"},
      {"rank-00001-of-00004.safetensors", [](auto const& path) { alter(path, 3); }, "is damaged: checksum mismatch"},
      {"rank-00001-of-00004.safetensors", [](auto const& path) { fs::remove(path); }, "cannot be opened"},
      {"rank-00001-of-00004.safetensors.json", [](auto const& path) { alter(path, 40); }, "is damaged: checksum"},
      {"rank-00001-of-00004.safetensors.json", [](auto const& path) { fs::remove(path); }, "cannot be opened"},
      {"rank-00001-of-00004.safetensors.snapshot.json", [](auto const& path) { alter(path, 60); }, "checksum mismatch"},
      {"rank-00001-of-00004.safetensors.snapshot.json", cut, ""},
      {"rank-00001-of-00004.safetensors.snapshot.json", [](auto const& path) { fs::resize_file(path, 9); },
       "is not a JSON object"}};
  for (auto const& fault : faults) {
    if (only_first && &fault != &faults.front()) break;
    Folder const folder;
    auto const wanted = take(folder, two_nodes, {2, 4});
    auto const newest = files_on(folder, 0, fault.ending);
    REQUIRE(newest.size() == 2);
    fault.act(newest[1]);
    auto now = resume(folder, two_nodes);  // node 1 has the copy
    INFO(fault.ending << ": " << fault.said << "\n" << all(now.notes));
    CHECK(now.step == 4);
    CHECK((now.state == wanted[1]));
    if (!fault.said.empty()) {
      CHECK(has(all(now.notes), "snapshot '" + newest[1].parent_path().string()));
      CHECK(has(all(now.notes), "is skipped: "));
      CHECK(has(all(now.notes), fault.said));
      CHECK(std::count(now.notes.begin(), now.notes.end(), now.notes.front()) == 1);
    }
    // The copy too: the older snapshot.
    Folder const both;
    take(both, two_nodes, {2, 4});
    for (int node : {0, 1}) fault.act(files_on(both, node, fault.ending)[1]);
    if (fault.said.empty()) continue;  // the end of the text says nothing
    now = resume(both, two_nodes);
    CHECK(now.step == 2);
    CHECK((now.state == wanted[0]));
    CHECK(has(all(now.notes), "the snapshot of step 4 is skipped: no node holds the slices of rank 1\n"));
  }
  CHECK_RANKS();
}

TEST_CASE("ranks of a node read the files of one another, whichever of them removes some first") {
  Folder const folder;
  take(folder, two_nodes, {2, 4});
  fs::remove(files_on(folder, 0, "rank-00001-of-00004.safetensors")[0]);
  auto const place = place_of(folder, 0);
  auto const second = fsdp::checkpoint::report_of_slices(place, "", 1, 2);  // removes the header of what is missing
  auto const first = fsdp::checkpoint::report_of_slices(place, "", 0, 2);
  CHECK(has(second, "is skipped"));
  auto const both = first + second;
  CHECK(std::count(both.begin(), both.end(), '\n') == 8);
  for (std::string const rank : {"0", "2", "3"}) CHECK(has(both, " 4 " + rank + "\n"));
}

TEST_CASE("snapshots of another run, build, model or step are skipped and named") {
  Folder const folder;
  take(folder, two_nodes, {2}, fsdp::FullShard{}, "earlier");
  auto now = resume(folder, two_nodes);
  CHECK(now.step == -1);
  CHECK(has(all(now.notes), "is skipped: another build took it ('earlier'; this is 'b')"));
  CHECK(resume(folder, two_nodes, fsdp::FullShard{}, "earlier").step == 2);  // it stays

  // A newer step that was copied under an older one's name.
  Folder const moved;
  auto const wanted = take(moved, two_nodes, {2, 4});
  for (int node : {0, 1}) {
    auto const from = files_on(moved, node, "rank-00000-of-00004.safetensors");
    for (std::string const ending : {"", ".json", ".snapshot.json"})
      fs::copy_file(from[0].string() + ending, from[1].string() + ending, fs::copy_options::overwrite_existing);
  }
  now = resume(moved, two_nodes);
  CHECK(now.step == 2);
  CHECK((now.state == wanted[0]));
  CHECK(has(all(now.notes), "is skipped: it is of step 2, rank 0 of 4"));

  // Another model, by its checksum before anything is loaded, and by its tensors when it is.
  run<fsdp::Fp32>({4, fsdp::FullShard{}, tiny()}, make_adamw, [&](auto& engine, auto&, auto& adamw) {
    auto const place = place_of(folder, two_nodes[static_cast<std::size_t>(engine.rank())], "earlier");
    std::vector<std::string> notes;
    RANK_CHECK(!fsdp::find_snapshot(engine.world(), place, notes, "another"));
    RANK_CHECK(engine.rank() != 0 || has(all(notes), "is skipped: it belongs to another model"));
    auto const found = fsdp::find_snapshot(engine.world(), place, notes);
    auto const before = state_of(engine, adamw);
    RANK_CHECK(has(what<fsdp::ConfigError>([&] { fsdp::load_snapshot(engine, adamw, *found); }), "shape"));
    RANK_CHECK((state_of(engine, adamw) == before));
  });
  CHECK_RANKS();
}

TEST_CASE("of each snapshot, two are kept; while one is written, the one before is whole") {
  Folder const folder;
  run<fsdp::Fp32>(trial_on(4), make_adamw, [&](auto& engine, auto& network, auto& adamw) {
    auto const place = place_of(folder, two_nodes[static_cast<std::size_t>(engine.rank())]);
    fsdp::Snapshots snapshots(engine, place);
    RANK_CHECK(snapshots.nodes() == 2);
    for (int step = 1; step <= 5; ++step) {
      train(network, adamw, step - 1, step);
      RANK_CHECK(snapshots.take(adamw, step).begun);
      RANK_CHECK(snapshots.wait().empty());
      engine.world().exchange("", "a barrier");
      if (engine.rank() == 0)
        for (int node : {0, 1}) RANK_CHECK(snapshots_on(folder, node) == static_cast<std::size_t>(std::min(step, 2)));
      engine.world().exchange("", "a barrier");
    }
    auto const mode = [](fs::path const& path) {
      struct stat status {};
      return ::stat(path.c_str(), &status) == 0 ? status.st_mode & 0777 : 0;
    };
    if (engine.rank() == 0) {
      auto const header = files_on(folder, 1, "rank-00000-of-00004.safetensors.snapshot.json").back();
      RANK_CHECK(mode(header) == 0600);
      RANK_CHECK(mode(header.parent_path()) == 0700 && mode(place.folder) == 0700);
      std::ifstream file(header);
      std::string const text{std::istreambuf_iterator<char>(file), {}};
      RANK_CHECK(has(text, ", rank 0\"") && has(text, ", rank 2\""));  // both holders
    }
    engine.world().exchange("", "a barrier");
    snapshots.clear();
    if (engine.rank() == 0)
      for (int node : {0, 1}) RANK_CHECK(snapshots_on(folder, node) == 0);
  });
  CHECK_RANKS();
}

TEST_CASE("a rank that dies before its slices are written leaves the snapshot before") {
  Folder const folder;
  auto const wanted = take(folder, two_nodes, {2, 4});
  // Node 0 has no file of rank 1, and node 1 no copy: as if rank 1 had been killed.
  for (int node : {0, 1})
    for (std::string const ending : {".snapshot.json", ".json", ""})
      fs::remove(files_on(folder, node, "rank-00001-of-00004.safetensors" + ending)[1]);
  auto const now = resume(folder, {0, 1, 1});
  CHECK(now.step == 2);
  CHECK((now.state == wanted[0]));
  CHECK(has(all(now.notes), "the snapshot of step 4 is skipped: no node holds the slices of rank 1\n"));
  CHECK_RANKS();
}

TEST_CASE("a snapshot that cannot be written is reported by the next call, and training goes on") {
  Folder const folder;
  run<fsdp::Fp32>(trial_on(4), make_adamw, [&](auto& engine, auto& network, auto& adamw) {
    auto const place = place_of(folder, two_nodes[static_cast<std::size_t>(engine.rank())]);
    fsdp::Snapshots snapshots(engine, place);
    train(network, adamw, 0, 2);
    RANK_CHECK(snapshots.take(adamw, 2, {{"step", 2}}).begun);
    RANK_CHECK(snapshots.wait().empty());
    auto const run_folder = fsdp::checkpoint::run_folder(place);
    if (engine.rank() == 3) {  // a file where node 1 keeps the run's snapshots
      fs::rename(run_folder, run_folder.string() + ".aside");
      std::ofstream(run_folder.string()) << "x";
    }
    engine.world().exchange("", "a barrier");
    RANK_CHECK(snapshots.take(adamw, 3).begun);
    auto const why = snapshots.wait();
    RANK_CHECK(has(why, "the snapshot of step 3 was not kept: rank 2: ") && has(why, "is not a folder"));
    if (engine.rank() == 3) {
      fs::remove(run_folder);
      fs::rename(run_folder.string() + ".aside", run_folder);
    }
    engine.world().exchange("", "a barrier");
    auto const next = snapshots.take(adamw, 4, {{"step", 4}});
    RANK_CHECK(next.begun && has(next.warning, "the snapshot of step 3 was not kept: rank 2: "));
    RANK_CHECK(snapshots.wait().empty());
    auto const left = files_on(folder, 0, "00000-of-00004.safetensors");
    RANK_CHECK(left.size() == 2 && has(left[0].string(), "step-2.") && has(left[1].string(), "step-4."));
  });
  CHECK(resume(folder, two_nodes).step == 4);
  CHECK_RANKS();
}

TEST_CASE("a folder that others may enter, of another kind, or shared by machines is refused on every rank") {
  Folder const folder;
  for (int node : {0, 1}) fs::create_directory(folder.path / std::to_string(node));
  fs::permissions(folder.path / "0", fs::perms::owner_all);
  fs::permissions(folder.path / "1", fs::perms::owner_all | fs::perms::group_exec);
  auto const refusal = [&](std::string const& part) {
    run<fsdp::Fp32>(trial_on(4), make_adamw, [&](auto& engine, auto&, auto&) {
      auto const place = place_of(folder, two_nodes[static_cast<std::size_t>(engine.rank())]);
      RANK_CHECK(has(what<fsdp::ConfigError>([&] { fsdp::Snapshots(engine, place); }), part));
    });
    CHECK_RANKS();
  };
  refusal("snapshots: rank 2: other users may enter '" + (folder.path / "1").string() + "'");
  fs::remove(folder.path / "1");
  folder.file("1", "x");
  refusal("is not a folder");
  fs::remove(folder.path / "1");
  fs::create_directory_symlink(folder.path / "0", folder.path / "1");
  refusal("is not a folder");
  fs::remove(folder.path / "1");
  std::vector<std::string> notes;
  auto const answer = fsdp::checkpoint::nodes_in({"=a 1:1 x ", "=b 1:2 y ", "=a 1:1 y "}, notes);
  CHECK(has(answer, "!ranks 0 and 2 are on different machines and see the same folder for snapshots"));
  using fsdp::checkpoint::nodes_in;
  CHECK(nodes_in({"=a 1:1 x ", "=a 1:1 x ", "=b 1:2 x ", "=a 1:1 x "}, notes) == "2:0:0 1:1:0 1:0:0 ");
  CHECK(notes.empty());
  // Ranks 1 and 2 could not read a name: one sees the folder of rank 0, the other one another machine's.
  CHECK(nodes_in({"=a 1:1 x ", "=- 1:1 x is full", "=- 1:1 y is full", "=- 1:1 y is full"}, notes) == "2:0:0 2:1:0 ");
  CHECK(all(notes) == "rank 2: the folder for snapshots has no name: is full\n");
}

namespace {

/// While it lives, no file of the process can grow, as on a disk that is full.
class FullDisk {
 public:
  FullDisk() {
    ::getrlimit(RLIMIT_FSIZE, &before_);
    auto none = before_;
    none.rlim_cur = 0;
    before_handler_ = std::signal(SIGXFSZ, SIG_IGN);
    ::setrlimit(RLIMIT_FSIZE, &none);
  }
  FullDisk(FullDisk const&) = delete;
  FullDisk& operator=(FullDisk const&) = delete;
  ~FullDisk() {
    ::setrlimit(RLIMIT_FSIZE, &before_);
    std::signal(SIGXFSZ, before_handler_);
  }

 private:
  ::rlimit before_{};
  void (*before_handler_)(int) = nullptr;
};
std::size_t files_in(fs::path const& folder) {
  return static_cast<std::size_t>(std::distance(fs::directory_iterator(folder), fs::directory_iterator()));
}

}  // namespace

TEST_CASE("snapshots in a folder that is full are loaded, with a name or without, and nothing is left there") {
  Folder const folder;
  auto const wanted = take(folder, two_nodes, {2, 4}).back();
  for (bool const named : {true, false}) {
    if (!named) fs::remove(folder.path / "0" / "node");
    auto const files = files_on(folder, 0, "");
    auto const changed = fs::last_write_time(folder.path / "0");
    auto const now = [&] {
      FullDisk const full;
      return resume(folder, two_nodes);
    }();
    INFO(all(now.notes));
    CHECK(now.step == 4);
    CHECK((now.state == wanted));
    CHECK((files_on(folder, 0, "") == files));
    if (named) CHECK(fs::last_write_time(folder.path / "0") == changed);
    CHECK(now.notes.size() == (named ? 0U : 1U));
    CHECK(has(all(now.notes), "rank 0: the folder for snapshots has no name: '") == !named);
    CHECK(has(all(now.notes), (folder.path / "0" / "node").string() + "' cannot be written: ") == !named);
  }
  CHECK(resume(folder, two_nodes).notes.empty());  // it gets its name
  CHECK(fs::exists(folder.path / "0" / "node"));

  // A node that holds nothing cannot fetch: that is an error of loading, after which a checkpoint is loaded.
  lose(folder, 1);
  fs::create_directory(folder.path / "1");
  fs::permissions(folder.path / "1", fs::perms::owner_all);
  run<fsdp::Fp32>(trial_on(4), make_adamw, [&](auto& engine, auto&, auto& adamw) {
    std::optional<FullDisk> full;
    if (engine.rank() == 0) full.emplace();
    engine.world().exchange("", "a barrier");
    auto const place = place_of(folder, two_nodes[static_cast<std::size_t>(engine.rank())]);
    std::vector<std::string> notes;
    auto const found = fsdp::find_snapshot(engine.world(), place, notes);
    RANK_CHECK(found && found->step == 4);
    auto const before = state_of(engine, adamw);
    auto const why = what<fsdp::ResourceError>([&] { fsdp::load_snapshot(engine, adamw, *found); });
    RANK_CHECK(has(why, "rank 2: ") && has(why, "cannot be written: "));
    RANK_CHECK((state_of(engine, adamw) == before));
    RANK_CHECK(engine.rank() != 2 || files_on(folder, 1, ".tmp").empty());
    engine.world().exchange("", "a barrier");
  });
  CHECK(files_in(folder.path / "1") == 1);  // the run's folder
  CHECK_RANKS();
}

TEST_CASE("a folder's name that is damaged is named, and its snapshots are loaded") {
  for (std::string const name : {"", "0123", "0123456789abcdefx", "0123456789abcdeX"}) {
    if (only_first && !name.empty()) break;
    Folder const folder;
    auto const wanted = take(folder, two_nodes, {2}).back();
    for (int node : {0, 1}) std::ofstream(folder.path / std::to_string(node) / "node") << name;
    auto const now = resume(folder, two_nodes);
    INFO(name << ": " << all(now.notes));
    CHECK(now.step == 2);
    CHECK((now.state == wanted));
    CHECK(now.notes.size() == 2);
    for (auto const* const rank : {"0", "2"})
      CHECK(has(all(now.notes), std::string("rank ") + rank + ": the folder for snapshots has no name: '"));
    CHECK(has(all(now.notes), (folder.path / "0" / "node").string()));
    CHECK(has(all(now.notes), "; remove it, and the next start writes another one"));
    for (int node : {0, 1}) fs::remove(folder.path / std::to_string(node) / "node");
    CHECK(resume(folder, two_nodes).notes.empty());
  }
  CHECK_RANKS();
}

TEST_CASE("the newest whole snapshot is known when it has been waited for, or the next one has begun") {
  Folder const folder;
  run<fsdp::Fp32>(trial_on(2), make_adamw, [&](auto& engine, auto&, auto& adamw) {
    fsdp::Snapshots snapshots(engine, place_of(folder, engine.rank()));
    RANK_CHECK(snapshots.newest_whole() == -1);
    RANK_CHECK(snapshots.wait().empty() && snapshots.newest_whole() == -1);
    RANK_CHECK(snapshots.take(adamw, 0).begun && snapshots.newest_whole() == -1);
    RANK_CHECK(snapshots.wait().empty() && snapshots.newest_whole() == 0);
    RANK_CHECK(snapshots.take(adamw, 1).begun && snapshots.newest_whole() == 0);
    RANK_CHECK(snapshots.wait().empty() && snapshots.newest_whole() == 1);
    snapshots.clear();
    RANK_CHECK(snapshots.newest_whole() == -1);
  });
  CHECK_RANKS();
}

TEST_CASE("ranks that take different snapshots are told, and a busy one leaves the next out") {
  using fsdp::checkpoint::answer_to_words;
  std::string const id(16, 'a'), what(16, '0'), other(16, '1');
  CHECK(answer_to_words({"=" + id + what, "=" + id + what}) == "=" + id);
  CHECK(answer_to_words({"=" + id + what, "~" + id + what}) == "~" + id + "the one before is still being written");
  CHECK(answer_to_words({"=" + id + what, "M" + id + what + "none"}) == "M" + id + "rank 1: none");
  CHECK(answer_to_words({"!" + id + what + "full", "=" + id + what}) == "!" + id + "rank 0: full");
  CHECK(answer_to_words({"=" + id + what, "=" + id + other})[0] == 'X');
  Folder const folder;
  run<fsdp::Fp32>(trial_on(2), make_adamw, [&](auto& engine, auto&, auto& adamw) {
    fsdp::Snapshots snapshots(engine, place_of(folder, engine.rank()));
    RANK_CHECK(has(fsdp::testing::what<fsdp::OrderError>([&] { snapshots.take(adamw, engine.rank()); }),
                   "takes a snapshot of another step or state"));
  });
  CHECK_RANKS();
}
