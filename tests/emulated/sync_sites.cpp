// SPDX-License-Identifier: Apache-2.0
// Every barrier is needed: a kernel that runs without it gives another result, or cannot go on.
// skip-sanitizers
#include <algorithm>
#include <array>
#include <cctype>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "tests/catch.hpp"
#include "tests/emulated/everywhere.hpp"
#include "tests/support/emulated_tile.hpp"
#include "transformer/kernels/row_kernels.hpp"

using namespace emulated;
using fsdp::bf16;
using fsdp::SyncSite;
using kernel_test::random_values;

namespace {

kernel_test::LoopDevice::Stream stream;

Doubles layer_norm(Device const& device) {
  std::int64_t const columns = 4099;
  auto const x = random_values(columns, 1), weight = random_values(columns, 2);
  std::vector<float> y(x.size());
  transformer::layer_norm_forward(device, stream, x.data(), weight.data(), static_cast<float const*>(nullptr), y.data(),
                                  static_cast<float*>(nullptr), static_cast<float*>(nullptr), 1, columns);
  return doubles(y);
}

Doubles layer_norm_gradient(Device const& device) {
  std::int64_t const rows = 40, columns = 1280;
  auto const copy = [](std::vector<float> const& values) { return Aligned<float>(values.begin(), values.end()); };
  auto const dy = copy(random_values(rows * columns, 1)), x = copy(random_values(rows * columns, 2));
  auto const weight = copy(random_values(columns, 3)), mean = copy(random_values(rows, 4)), scale = mean;
  Aligned<float> dx(dy.size()), weight_gradient(size(columns)), bias_gradient(size(columns));
  Aligned<float> partials(size(transformer::layer_norm_partials(rows, columns)));
  transformer::layer_norm_backward(device, stream, dy.data(), x.data(), weight.data(), mean.data(), scale.data(),
                                   static_cast<float const*>(nullptr), dx.data(), weight_gradient.data(),
                                   bias_gradient.data(), rows, columns, partials.data());
  Doubles all(dx.begin(), dx.end());
  all.insert(all.end(), weight_gradient.begin(), weight_gradient.end());
  all.insert(all.end(), bias_gradient.begin(), bias_gradient.end());
  return all;
}

Doubles bias_gradient(Device const& device) {
  std::int64_t const rows = 70, columns = 256;
  auto const dy = random_values<bf16>(rows * columns, 3);
  std::vector<bf16> gradient(size(columns), bf16(1.0f));
  std::vector<float> partials(size(transformer::bias_partials(rows, columns)));
  transformer::bias_backward(device, stream, dy.data(), rows, columns, gradient.data(), partials.data());
  return doubles(gradient);
}

Doubles cross_entropy(Device const& device) {
  std::int64_t const rows = 2, vocabulary = 2048;
  auto logits = random_values(rows * vocabulary, 4);
  std::vector<std::int32_t> const targets{3, 1500};
  std::vector<float> losses(size(rows));
  transformer::cross_entropy_backward(device, stream, logits.data(), targets.data(), losses.data(), rows, vocabulary,
                                      vocabulary, 0.5);
  return doubles(logits);
}

/// Forward and backward over several tiles: the result, and the gradients.
template <std::int64_t Size>
Doubles flash_attention(Device const& device) {
  transformer::FlashShape shape;
  shape.length = shape.capacity = 200;
  shape.width = Size;
  shape.scale = 0.1f;
  auto const copy = [](std::vector<bf16> const& values) { return Aligned<bf16>(values.begin(), values.end()); };
  auto const qkv = copy(random_values<bf16>(200 * 3 * Size, 5)), up = copy(random_values<bf16>(200 * Size, 6));
  Aligned<bf16> mixed(up.size()), gradient(qkv.size());
  Aligned<float> log_sums(size(shape.statistics())), products(log_sums.size());
  transformer::flash_attention_forward(device, stream, shape, {}, qkv.data(), mixed.data(), log_sums.data());
  transformer::flash_attention_backward(
      device, stream, shape, {},
      {qkv.data(), mixed.data(), up.data(), log_sums.data(), products.data(), gradient.data()});
  Doubles all;
  for (auto const& value : mixed) all.push_back(kernel_test::as_double(value));
  for (auto const& value : gradient) all.push_back(kernel_test::as_double(value));
  return all;
}

/// Kernels that pass barriers, and what they compute.
struct Run {
  std::string_view name;
  std::function<Doubles(Device const&)> results;
};
std::vector<Run> const runs{
    {"layer_norm", layer_norm},
    {"layer_norm_gradient", layer_norm_gradient},
    {"bias_gradient", bias_gradient},
    {"cross_entropy", cross_entropy},
    {"flash_attention<64>", flash_attention<64>},
    {"flash_attention<128>", flash_attention<128>},
};

bool same(Doubles const& a, Doubles const& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(double)) == 0;
}

/// Places of the barriers that a run comes to, and those that it does as well without.
struct Outcome {
  Sites met, not_missed;
};

/// Drops the barriers of each place that a run comes to, one place at a time, under every schedule until it is missed.
Outcome drop_each(Run const& run) {
  constexpr std::array order{Schedule::greedy_forward, Schedule::greedy_reverse, Schedule::forward, Schedule::reverse,
                             Schedule::shuffled};
  static_assert(order.size() == schedules.size());
  Outcome outcome;
  auto const right = run.results(Device{});
  for (auto const schedule : order) {
    CAPTURE(run.name, name(schedule));
    Device device;
    device.options.schedule = schedule;
    device.options.met = &outcome.met;
    REQUIRE(same(run.results(device), right));
  }
  for (auto const& site : outcome.met) {
    CAPTURE(run.name, text(site));
    bool missed = false;
    for (auto const schedule : order) {
      Device device;
      device.options.schedule = schedule;
      device.options.drop = site;
      std::int64_t dropped = 0;
      device.options.dropped = &dropped;
      try {
        missed = !same(run.results(device), right);
      } catch (Failure const&) {
        missed = true;
      }
      CHECK(dropped > 0);
      if (missed) break;
    }
    if (!missed) outcome.not_missed.insert(site);
  }
  return outcome;
}

/// Barriers in a line of a source: calls without an argument, and callers that pass their own place on. A place that is
/// a default argument, or a parameter that is passed on, is none.
std::int64_t barriers_in(std::string_view line) {
  line = line.substr(0, line.find("//"));
  std::int64_t count = 0;
  for (std::string_view const call : {"sync()", "sync_warp()", "SyncSite::here()"}) {
    for (auto at = line.find(call); at != line.npos; at = line.find(call, at + 1)) {
      auto before = line.substr(0, at);
      if (before.ends_with("fsdp::")) before.remove_suffix(6);
      bool const other_name = !before.empty() && (std::isalnum(before.back()) != 0 || before.back() == '_');
      if (!other_name && !before.ends_with("= ")) ++count;
    }
  }
  return count;
}

/// Barriers in every source of the library and of the examples that has any; a path begins below include/ or examples/.
std::map<std::string, std::int64_t> barriers_in_sources() {
  namespace fs = std::filesystem;
  auto const root = fs::absolute(fs::path(__FILE__)).parent_path().parent_path().parent_path();
  std::map<std::string, std::int64_t> barriers;
  for (char const* const folder : {"include", "examples"}) {
    for (auto const& entry : fs::recursive_directory_iterator(root / folder)) {
      std::string const type = entry.path().extension().string();
      if (type != ".hpp" && type != ".cpp" && type != ".cu" && type != ".cuh") continue;
      std::ifstream source(entry.path());
      std::int64_t count = 0;
      for (std::string line; std::getline(source, line);) count += barriers_in(line);
      if (count > 0) barriers[entry.path().lexically_relative(root / folder).generic_string()] = count;
    }
  }
  return barriers;
}

/// One barrier that is needed, and one behind it that is not.
struct OneTooMany {
  static constexpr int threads = 64;
  static constexpr std::size_t shared_bytes = 64 * sizeof(double);
  static constexpr int needed = __LINE__ + 6;
  template <class Block>
  void operator()(Block const& block, std::int64_t, double* out) const {
    auto* const shared = reinterpret_cast<double*>(block.shared());
    shared[block.thread()] = block.thread();
    // The line that `needed` names:
    block.sync();
    out[block.thread()] = shared[63 - block.thread()];
    block.sync();
  }
};

}  // namespace

TEST_CASE("a barrier that is not needed is found", "[emulated][sites]") {
  auto const [met, not_missed] = drop_each({"one too many", [](Device const& device) {
                                              std::vector<double> out(64);
                                              device.launch(stream, 1, OneTooMany{}, out.data());
                                              return out;
                                            }});
  REQUIRE(met.size() == 2);
  CHECK(met.begin()->line == OneTooMany::needed);
  REQUIRE(not_missed.size() == 1);
  CHECK(not_missed.begin()->line == OneTooMany::needed + 2);
}

TEST_CASE("barriers are found in the sources", "[emulated][sites]") {
  CHECK(barriers_in("    block.sync();  // as block.sync() does") == 1);
  CHECK(barriers_in("  Lanes::sync(SyncSite::here());") == 1);
  CHECK(barriers_in("  if (a) block.sync(); else block.sync_warp();") == 2);
  CHECK(barriers_in("    store(block, fsdp::SyncSite::here(), 1);") == 1);
  CHECK(barriers_in("  void sync(SyncSite site = SyncSite::here()) const { Lanes::sync(site); }") == 0);
  CHECK(barriers_in("  auto f(Block const& block, fsdp::SyncSite site = fsdp::SyncSite::here());") == 0);
  CHECK(barriers_in("  auto const waits = engine.no_sync();") == 0);
}

// The library's barriers may serve one kernel and be idle in another; a kernel's own are needed wherever it runs.
TEST_CASE("a dropped barrier is missed, whichever it is", "[emulated][sites]") {
  Sites met, missed;
  for (auto const& run : runs) {
    auto const outcome = drop_each(run);
    for (auto const& site : outcome.met) {
      CAPTURE(run.name, text(site));
      bool const noticed = outcome.not_missed.count(site) == 0;
      bool const of_library = std::string_view(site.file).ends_with("fsdp/detail/cuda/block.hpp");
      if (!of_library) CHECK(noticed);
      met.insert(site);
      if (noticed) missed.insert(site);
    }
  }
  auto const sources = barriers_in_sources();
  std::map<std::string, std::int64_t> passed;
  for (auto const& site : met) {
    CAPTURE(text(site));
    CHECK(missed.count(site) == 1);
    auto const source = std::find_if(sources.begin(), sources.end(), [&](auto const& entry) {
      return std::string_view(site.file).ends_with("/" + entry.first);
    });
    if (source == sources.end()) FAIL("a barrier that is not found in the sources");
    ++passed[source->first];
  }
  for (auto const& [source, barriers] : sources) {
    CAPTURE(source);
    CHECK(passed[source] == barriers);  // else no run passes one of them, or two stand in one line
  }
  CHECK(met.size() >= 15);  // as many as there were when this was written
}
