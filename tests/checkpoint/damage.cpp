// SPDX-License-Identifier: Apache-2.0
// Damaged or incomplete checkpoints, and other models', are refused on every rank, and nothing has changed then.
// skip-tsan
// needs: nlohmann_json xxHash
#include <sys/stat.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "fsdp/checkpoint.hpp"
#include "tests/catch.hpp"
#include "tests/checkpoint/support.hpp"
#include "tests/support/messages.hpp"
#include "tests/support/sanitized.hpp"
#include "tests/support/temporary_folder.hpp"

namespace {

namespace fs = std::filesystem;
using namespace fsdp::testing;
using Folder = TemporaryFolder;

std::string bytes_of(fs::path const& path) {
  std::ifstream stream(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(stream), {}};
}
void write_bytes(fs::path const& path, std::string const& bytes) { std::ofstream(path, std::ios::binary) << bytes; }

/// One rank, with a checkpoint of two ranks to load.
struct Victim {
  Folder folder;
  fs::path place;
  State saved;

  Victim() {
    run<fsdp::Fp32>({2, fsdp::FullShard{}, tiny()}, make_adamw, [&](auto& engine, auto& network, auto& adamw) {
      train(network, adamw, 0, 2);
      auto const path = fsdp::save(engine, adamw, folder.path, {{"text", "some"}});
      auto state = state_of(engine, adamw);
      if (engine.rank() == 0) saved = std::move(state), place = path;
    });
  }
  /// @return the message with which load() refuses; "" if it loads the right thing, "wrong" if it loads anything else
  template <class E, class O>
  std::string load_into(E& engine, O& optimizer, State const& before) const {
    std::string message;
    try {
      fsdp::load(engine, optimizer, place);
    } catch (fsdp::ConfigError const& error) {
      message = error.what();
    }
    auto const now = state_of(engine, optimizer);
    if (message.empty()) return now == saved ? "" : "wrong";
    return now == before ? message : "changed: " + message;
  }
  template <class Body>
  void with_engine(Body&& body) const {
    run<fsdp::Fp32>({1, fsdp::NoShard{}, tiny()}, make_adamw, [&](auto& engine, auto&, auto& adamw) {
      auto const before = state_of(engine, adamw);
      body([&] {
        auto text = load_into(engine, adamw, before);
        if (text.empty()) restore(engine, adamw, before);
        return text;
      });
    });
  }

 private:
  template <class E, class O>
  static void restore(E& engine, O& optimizer, State const& before) {
    fsdp::import_shard(engine, [&](fsdp::TensorInfo const& tensor, std::int64_t first, std::span<float> out) {
      auto const& values = before.arrays.at("parameters of " + tensor.name);
      std::copy_n(values.begin() + first, out.size(), out.begin());
    });
    auto const shards = engine.shards();
    for (std::size_t i = 0; i < 2; ++i)
      for (std::size_t u = 0; u < shards.size(); ++u) std::fill_n(optimizer.state(i, u), shards[u].shard_numel(), 0.0f);
    optimizer.set_steps(0);
  }
};

std::vector<fs::path> files_of(fs::path const& folder) {
  std::vector<fs::path> files;
  for (auto const& entry : fs::directory_iterator(folder)) files.push_back(entry.path());
  std::sort(files.begin(), files.end());
  return files;
}

/// A manifest or a description with another text in it, and the checksums that it needs to be believed.
void rewrite(fs::path const& place, std::string const& file, std::string const& from, std::string const& to) {
  using namespace fsdp::checkpoint;
  auto text = bytes_of(place / file);
  auto const at = text.find(from);
  REQUIRE(at != std::string::npos);
  text.replace(at, from.size(), to);
  write_bytes(place / file, text);
  auto manifest = Json::parse(bytes_of(place / manifest_name));
  for (auto& each : manifest["files"]) {
    auto const name = description_name(each["name"].get<std::string>());
    if (name == file) each["description_xxh64"] = checksum_text(checksum_of(text));
  }
  manifest.erase("xxh64");
  manifest["xxh64"] = checksum_text(checksum_of(manifest.dump()));
  write_bytes(place / manifest_name, manifest.dump(1));
}

}  // namespace

TEST_CASE("every byte counts: one that is flipped is noticed, or changes nothing") {
  Victim const victim;
  victim.with_engine([&](auto const& load) {
    REQUIRE(load().empty());
    for (auto const& path : files_of(victim.place)) {
      auto const whole = bytes_of(path);
      int noticed = 0, harmless = 0;
      for (std::size_t i = 0; i < whole.size(); i += fsdp::testing::sanitized ? 11 : 1) {
        auto bytes = whole;
        bytes[i] = static_cast<char>(bytes[i] ^ (1 << (i % 7)));
        write_bytes(path, bytes);
        auto const text = load();
        if (text.starts_with("changed") || text == "wrong") FAIL(path << ", byte " << i << ": " << text);
        ++(text.empty() ? harmless : noticed);
      }
      write_bytes(path, whole);
      INFO(path);
      if (path.filename() != fsdp::checkpoint::manifest_name) CHECK(harmless == 0);
      CHECK(noticed > harmless);  // blanks between a manifest's fields
    }
  });
}

TEST_CASE("every byte is needed: files that are cut short, or gone, are noticed") {
  Victim const victim;
  victim.with_engine([&](auto const& load) {
    for (auto const& path : files_of(victim.place)) {
      auto const whole = bytes_of(path);
      for (std::size_t length = 0; length < whole.size(); length += 1 + whole.size() / 97) {
        write_bytes(path, whole.substr(0, length));
        auto const text = load();
        INFO(path << " cut to " << length << ": " << text);
        CHECK(has(text, path.filename().string()));
        CHECK_FALSE(text.starts_with("changed"));
      }
      write_bytes(path, whole + "x");
      CHECK(has(load(), path.filename().string()));
      fs::remove(path);
      CHECK(has(load(), path.filename().string() + "' cannot be opened"));
      fs::create_directory(path);
      CHECK(has(load(), path.filename().string()));
      fs::remove(path);
      write_bytes(path, whole);
    }
    CHECK(load().empty());
  });
}

TEST_CASE("what checksums cannot find: nonsense that was written so") {
  struct Case {
    char const* file;
    char const* from;
    char const* to;
    char const* message;
  };
  std::string const first = "rank-00000-of-00002.safetensors.json";
  std::vector<Case> const cases{
      {"checkpoint.json", "\"version\": 1", "\"version\": 4",
       "was written by a newer fsdp (format 4; this one reads 1 to 3)"},
      {"checkpoint.json", "\"version\": 1", "\"version\": 2", "'optimizers' is missing"},
      {"checkpoint.json", "\"fsdp sharded checkpoint\"", "\"something\"", "'format'"},
      {"checkpoint.json", "\"step\": 2", "\"step\": 18446744073709551615", "'step'"},
      {"checkpoint.json", "\"step\": 2", "\"step\": -1", "'step'"},
      {"checkpoint.json", "\"ends.gain\"", "\"ends.other\"", "has no tensor 'ends.gain'"},
      {"checkpoint.json", "\"ends.gain\"", "\"ends.table\"", "has no tensor 'ends.gain'"},
      {"checkpoint.json", "\"exp_avg\"", "\"exp_max\"", "has the state of optimizer 'AdamW' (exp_max, "},
      {"checkpoint.json", "\"name\": \"parameters\",\n   \"dtype\": \"fp32\"",
       "\"name\": \"parameters\",\n   \"dtype\": \"fp16\"", "have a slice of another dtype"},
      {"checkpoint.json", "\"dtype\": \"fp32\"", "\"dtype\": \"fp8\"", "expected fp32, bf16 or fp16, got \"fp8\""},
      {"checkpoint.json", "\"name\": \"rank-00000-of-00002", "\"name\": \"../rank-00000-of-00002",
       "a name without a folder"},
      {"checkpoint.json", "\"name\": \"rank-00000-of-00002", "\"name\": \"rank-00001-of-00002",
       "'files': expected one entry for each of 2 ranks"},
      {"checkpoint.json", "\"world_size\": 2", "\"world_size\": 7", "'files': expected one entry for each of 7 ranks"},
      {"checkpoint.json", "\"steps\": 2", "\"steps\": 9223372036854775807", "'steps': expected a whole number"},
      {first.c_str(), "\"count\": ", "\"count\": 1", ""},
      {first.c_str(), "\"count\": ", "\"count\": 9223372036854775807", "'count': expected a whole number"},
      {first.c_str(), "\"first\": 0", "\"first\": 1", "overlap or leave a gap"},
      {first.c_str(), "\"bytes\": ", "\"bytes\": 1", "'bytes'"},
      {first.c_str(), "\"header_bytes\": ", "\"header_bytes\": 1", "'bytes'"},
      {first.c_str(), "\"header_bytes\": ", "\"header_bytes\": 3000000",
       "'header_bytes': expected a whole number from 8 to 1000"},
      {first.c_str(), "\"file\": \"rank-00000", "\"file\": \"rank-00007", "describes file 'rank-00007"},
  };
  for (auto const& each : cases) {
    Victim const victim;
    rewrite(victim.place, each.file, each.from, each.to);
    victim.with_engine([&](auto const& load) {
      auto const text = load();
      INFO(each.file << ": " << each.from << " becomes " << each.to << ": " << text);
      CHECK(has(text, each.message));
      CHECK(has(text, victim.folder.path.string()));
      CHECK_FALSE(text.starts_with("changed"));
    });
  }
}

TEST_CASE("one rank's trouble is every rank's error") {
  Victim const victim;
  auto const path = victim.place / "rank-00001-of-00002.safetensors";
  auto bytes = bytes_of(path);
  bytes.back() = static_cast<char>(bytes.back() ^ 1);
  write_bytes(path, bytes);
  run<fsdp::Fp32>({2, fsdp::FullShard{}, tiny()}, make_adamw, [&](auto& engine, auto&, auto& adamw) {
    auto const text = what([&] { fsdp::load(engine, adamw, victim.place); });
    if (engine.rank() != 0) return;
    CHECK(has(text, "rank 1: "));
    CHECK(has(text, "is damaged"));
  });
  for (auto const* pointer : {"step-2\nstep-3\n", "../step-2", "", "step-", "step-2.", "step-2x", "step--2"}) {
    write_bytes(victim.folder.path / "latest", pointer);
    run<fsdp::Fp32>({2, fsdp::FullShard{}, tiny()}, make_adamw, [&](auto& engine, auto&, auto& adamw) {
      auto const text = what([&] { fsdp::load_latest(engine, adamw, victim.folder.path); });
      if (engine.rank() == 0) CHECK(has(text, "expected the name of a checkpoint"));
    });
  }
}

TEST_CASE("a save that cannot be written is every rank's error, and leaves what was there") {
  Victim const victim;
  write_bytes(victim.folder.path / "file", "");
  run<fsdp::Fp32>({2, fsdp::FullShard{}, tiny()}, make_adamw, [&](auto& engine, auto&, auto& adamw) {
    auto const expect = [&](std::string const& words, auto const& act) {
      auto const text = what(act);
      if (engine.rank() == 0) CHECK(has(text, words));
    };
    auto const below = victim.folder.path / "file" / "below";
    expect("cannot be made: Not a directory", [&] { fsdp::save(engine, adamw, below); });
    fsdp::BackgroundSaver saver(engine);
    expect("cannot be made", [&] { saver.save(adamw, below); });
    expect("extra has a string that is not UTF-8", [&] {
      fsdp::save(engine, adamw, victim.folder.path, {{"x", "\xff"}});
    });
    expect("extra: 'best': 'loss' has a number that is not finite", [&] {
      fsdp::save(engine, adamw, victim.folder.path, {{"best", {{"loss", INFINITY}}}});
    });
    nlohmann::ordered_json deep;
    for (int i = 0; i < 60; ++i) {
      nlohmann::ordered_json outer;
      outer["in"] = std::move(deep);
      deep = std::move(outer);
    }
    expect("nested more than 48 deep", [&] { fsdp::save(engine, adamw, victim.folder.path, deep); });
    for (auto const* name : {"", ".", "..", "a/b", "a\nb", "step-1", "step-1/checkpoint.json", ".hidden", "x.tmp"})
      expect("cannot be the name of a pointer",
             [&] { fsdp::save(engine, adamw, victim.folder.path, {}, {.pointers = {name}}); });
    expect("SaveOptions::step: expected 0 or more, got -2",
           [&] { fsdp::save(engine, adamw, victim.folder.path, {}, {.step = -2}); });
    expect("0 (all) or more", [&] { fsdp::save(engine, adamw, victim.folder.path, {}, {.keep_last = -1}); });
    expect("got an empty path", [&] { fsdp::save(engine, adamw, ""); });
    auto const loaded = fsdp::load_latest(engine, adamw, victim.folder.path);
    if (engine.rank() == 0) CHECK(loaded->step == 2);
    // Ranks that mean different things.
    auto const apart = victim.folder.path / std::to_string(engine.rank());
    expect("ranks disagree", [&] { fsdp::save(engine, adamw, apart); });
    expect("ranks disagree", [&] { fsdp::load(engine, adamw, apart); });
    expect("ranks disagree",
           [&] { fsdp::save(engine, adamw, victim.folder.path, {}, {.keep_last = 1 + engine.rank()}); });
  });
}

TEST_CASE("one save at a time in a folder, of whoever: the second is refused, and the first is whole") {
  Folder const folder;
  run<fsdp::Fp32>({2, fsdp::FullShard{}, tiny()}, make_adamw, [&](auto& engine, auto& network, auto& adamw) {
    train(network, adamw, 0, 1);
    fsdp::BackgroundSaver first(engine), second(engine);
    std::string refused;
    {
      // Held as by a save of another process.
      std::optional<fsdp::checkpoint::FileLock> lock;
      if (engine.rank() == 0) {
        fs::create_directories(folder.path);
        lock.emplace(folder.path / ".lock");
      }
      engine.mean_over_ranks({});
      refused = what([&] { fsdp::save(engine, adamw, folder.path); });
      auto const again = what([&] { second.save(adamw, folder.path); });
      engine.mean_over_ranks({});
      if (engine.rank() == 0) CHECK(has(again, "another save is under way in the folder"));
    }
    engine.mean_over_ranks({});
    if (engine.rank() == 0) CHECK(has(refused, "another save is under way in the folder"));
    // Two savers: either the second is refused, or the first had ended.
    for (int i = 0; i < 30; ++i) {
      first.save(adamw, folder.path, {{"saver", 1}}, {.step = 7});
      auto const error = what([&] { second.save(adamw, folder.path, {{"saver", 2}}, {.step = 7}); });
      first.wait();
      second.wait();
      auto const loaded = fsdp::load_latest(engine, adamw, folder.path);
      if (engine.rank() == 0) CHECK(loaded->extra["saver"] == (error == "nothing was thrown" ? 2 : 1));
    }
  });
}

TEST_CASE("what is no regular file is refused, not waited for") {
  Victim const victim;
  for (auto const& path : {victim.place / "checkpoint.json", victim.place / "rank-00001-of-00002.safetensors",
                           victim.folder.path / "latest"}) {
    auto const bytes = bytes_of(path);
    fs::remove(path);
    REQUIRE(::mkfifo(path.c_str(), 0600) == 0);
    run<fsdp::Fp32>({1, fsdp::NoShard{}, tiny()}, make_adamw, [&](auto& engine, auto&, auto& adamw) {
      CHECK(has(what([&] { fsdp::load_latest(engine, adamw, victim.folder.path); }), "cannot be read"));
    });
    fs::remove(path);
    write_bytes(path, bytes);
  }
  run<fsdp::Fp32>({1, fsdp::NoShard{}, tiny()}, make_adamw, [&](auto& engine, auto&, auto& adamw) {
    CHECK(fsdp::load_latest(engine, adamw, victim.folder.path)->step == 2);
    CHECK(has(what([&] { fsdp::load_latest(engine, adamw, victim.folder.path / "latest"); }), "Not a directory"));
    CHECK_FALSE(fsdp::load_latest(engine, adamw, victim.folder.path / "none").has_value());
  });
}

TEST_CASE("saving removes its own checkpoints and leftovers, and nobody else's folders") {
  Folder const folder;
  std::vector<std::string> const others{"step-7", ".step-notes", ".step-5", ".step-9.partial.txt", "step-1.old"};
  std::vector<std::string> const leftovers{".step-3.partial", ".step-4.2.old"};
  for (auto const& names : {others, leftovers})
    for (auto const& name : names) {
      fs::create_directories(folder.path / name);
      write_bytes(folder.path / name / "precious", "text");
    }
  run<fsdp::Fp32>({1, fsdp::NoShard{}, tiny()}, make_adamw, [&](auto& engine, auto&, auto& adamw) {
    for (int i = 0; i < 4; ++i) fsdp::save(engine, adamw, folder.path, {}, {.step = 10 + i});
  });
  for (auto const& name : others) CHECK(fs::exists(folder.path / name / "precious"));
  for (auto const& name : leftovers) CHECK_FALSE(fs::exists(folder.path / name));
  for (int i = 0; i < 4; ++i) CHECK(fs::exists(folder.path / ("step-1" + std::to_string(i))) == (i >= 2));
}

TEST_CASE("names that a checkpoint could not tell apart, or not write, are refused by name") {
  using fsdp::checkpoint::expect_nameable;
  auto const problem = [](std::vector<std::string> const& names) {
    std::vector<fsdp::TensorInfo> tensors(names.size());
    for (std::size_t i = 0; i < names.size(); ++i) tensors[i].name = names[i];
    return what([&] { expect_nameable(tensors, {{"parameters", {}}, {"exp_avg", {}}}); });
  };
  CHECK(problem({"x", "exp_avg", "y/exp_avg/x"}) == "nothing was thrown");
  CHECK(has(problem({"exp_avg/x", "x"}), "exp_avg of tensor 'x' as 'exp_avg/x', a name that is taken"));
  CHECK(has(problem({"x\xff"}), "not UTF-8"));
}

TEST_CASE("a rank that does not see the folder of the others says so") {
  Folder const folder;
  run<fsdp::Fp32>({2, fsdp::FullShard{}, tiny()}, make_adamw, [&](auto& engine, auto&, auto& adamw) {
    fsdp::checkpoint::Save now(engine, fsdp::checkpoint::RunState(engine, adamw), folder.path, nullptr, {.step = 3});
    engine.mean_over_ranks({});
    if (engine.rank() == 0) fs::remove_all(folder.path / now.partial());  // as on another node's disk
    engine.mean_over_ranks({});
    if (engine.rank() == 0)
      CHECK(
          has(what([&] { now.write([](auto...) { return std::span<std::byte const>(); }); }),
              ".step-3.partial', which rank 0 created, is not visible here: checkpoints need a folder that all nodes"));
  });
}

TEST_CASE("an optimizer of another engine is refused") {
  Folder const folder;
  fsdp::local::run(1, fsdp::host::Device{}, [&](Comm comm) {
    fsdp::Mesh<Comm> mesh(std::move(comm));
    fsdp::Engine<Comm> a(mesh, fsdp::NoShard{}), b(mesh, fsdp::NoShard{});
    toy::Network of_a(a, tiny());
    toy::Network of_b(b, toy::Shape{});
    fsdp::AdamW adamw_a(a), adamw_b(b);
    CHECK(has(what([&] { fsdp::save(a, adamw_b, folder.path); }), "the optimizer 'AdamW' belongs to another engine"));
    CHECK(has(what([&] { fsdp::load(a, adamw_b, folder.path); }), "belongs to another engine"));
    fsdp::BackgroundSaver saver(b);
    CHECK(has(what([&] { saver.save(adamw_a, folder.path); }), "belongs to another engine"));
  });
}
