// SPDX-License-Identifier: Apache-2.0
// Every numbered barrier is needed: a kernel that runs without it gives another result, or cannot go on.
// skip-sanitizers
#include <cstdint>
#include <cstring>
#include <functional>
#include <vector>

#include "examples/nanogpt/row_kernels.hpp"
#include "tests/catch.hpp"
#include "tests/emulated/everywhere.hpp"
#include "tests/support/emulated_tile.hpp"

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
  nanogpt::layer_norm_forward(device, stream, x.data(), weight.data(), static_cast<float const*>(nullptr), y.data(),
                              static_cast<float*>(nullptr), static_cast<float*>(nullptr), 1, columns);
  return doubles(y);
}

Doubles layer_norm_gradient(Device const& device) {
  std::int64_t const rows = 40, columns = 1280;
  auto const copy = [](std::vector<float> const& values) { return Aligned<float>(values.begin(), values.end()); };
  auto const dy = copy(random_values(rows * columns, 1)), x = copy(random_values(rows * columns, 2));
  auto const weight = copy(random_values(columns, 3)), mean = copy(random_values(rows, 4)), scale = mean;
  Aligned<float> dx(dy.size()), weight_gradient(size(columns)), bias_gradient(size(columns));
  Aligned<float> partials(size(nanogpt::layer_norm_partials(rows, columns)));
  nanogpt::layer_norm_backward(device, stream, dy.data(), x.data(), weight.data(), mean.data(), scale.data(),
                               static_cast<float const*>(nullptr), dx.data(), weight_gradient.data(),
                               bias_gradient.data(), rows, columns, partials.data());
  return Doubles(dx.begin(), dx.end());
}

Doubles bias_gradient(Device const& device) {
  std::int64_t const rows = 70, columns = 256;
  auto const dy = random_values<bf16>(rows * columns, 3);
  std::vector<bf16> gradient(size(columns), bf16(1.0f));
  std::vector<float> partials(size(nanogpt::bias_partials(rows, columns)));
  nanogpt::bias_backward(device, stream, dy.data(), rows, columns, gradient.data(), partials.data());
  return doubles(gradient);
}

Doubles cross_entropy(Device const& device) {
  std::int64_t const rows = 2, vocabulary = 2048;
  auto logits = random_values(rows * vocabulary, 4);
  std::vector<std::int32_t> const targets{3, 1500};
  std::vector<float> losses(size(rows));
  nanogpt::cross_entropy_backward(device, stream, logits.data(), targets.data(), losses.data(), rows, vocabulary,
                                  vocabulary, 0.5);
  return doubles(logits);
}

/// Forward and backward over several tiles: the result, and the gradients.
template <std::int64_t Size>
Doubles flash_attention(Device const& device) {
  nanogpt::FlashShape shape;
  shape.length = shape.capacity = 200;
  shape.width = Size;
  shape.scale = 0.1f;
  auto const copy = [](std::vector<bf16> const& values) { return Aligned<bf16>(values.begin(), values.end()); };
  auto const qkv = copy(random_values<bf16>(200 * 3 * Size, 5)), up = copy(random_values<bf16>(200 * Size, 6));
  Aligned<bf16> mixed(up.size()), gradient(qkv.size());
  Aligned<float> log_sums(size(shape.statistics())), products(log_sums.size());
  nanogpt::flash_attention_forward(device, stream, shape, {}, qkv.data(), mixed.data(), log_sums.data());
  nanogpt::flash_attention_backward(
      device, stream, shape, {},
      {qkv.data(), mixed.data(), up.data(), log_sums.data(), products.data(), gradient.data()});
  Doubles all;
  for (auto const& value : mixed) all.push_back(kernel_test::as_double(value));
  for (auto const& value : gradient) all.push_back(kernel_test::as_double(value));
  return all;
}

/// What runs without a barrier to show that it is needed.
struct Entry {
  SyncSite site;
  std::function<Doubles(Device const&)> run;
};
std::vector<Entry> const entries{
    {SyncSite::reduction_slots_free, layer_norm},
    {SyncSite::reduction_slots_written, layer_norm},
    {nanogpt::site::partials_exchanged, bias_gradient},
    {nanogpt::site::logits_gradient_written, cross_entropy},
    {nanogpt::site::layer_norm_sums, layer_norm_gradient},
    {nanogpt::site::flash_forward_first, flash_attention<64>},
    {nanogpt::site::flash_forward_next, flash_attention<64>},
    {nanogpt::site::flash_forward_staged, flash_attention<64>},
    {nanogpt::site::flash_queries_first, flash_attention<64>},
    {nanogpt::site::flash_queries_next, flash_attention<64>},
    {nanogpt::site::flash_queries_staged, flash_attention<64>},
    {nanogpt::site::flash_keys_first, flash_attention<64>},
    {nanogpt::site::flash_keys_next, flash_attention<64>},
    {nanogpt::site::flash_keys_staged, flash_attention<64>},
    {nanogpt::site::flash_values_staged, flash_attention<64>},
    {nanogpt::site::flash_forward_first, flash_attention<128>},
    {nanogpt::site::flash_forward_next, flash_attention<128>},
    {nanogpt::site::flash_forward_staged, flash_attention<128>},
    {nanogpt::site::flash_queries_first, flash_attention<128>},
    {nanogpt::site::flash_queries_next, flash_attention<128>},
    {nanogpt::site::flash_queries_staged, flash_attention<128>},
    {nanogpt::site::flash_keys_first, flash_attention<128>},
    {nanogpt::site::flash_keys_next, flash_attention<128>},
    {nanogpt::site::flash_keys_staged, flash_attention<128>},
    {nanogpt::site::flash_values_staged, flash_attention<128>},
};

bool same(Doubles const& a, Doubles const& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(double)) == 0;
}

std::vector<fsdp::NamedSyncSite> all_sites() {
  std::vector<fsdp::NamedSyncSite> sites(fsdp::sync_sites.begin(), fsdp::sync_sites.end());
  sites.insert(sites.end(), nanogpt::sync_sites.begin(), nanogpt::sync_sites.end());
  return sites;
}

}  // namespace

TEST_CASE("barriers have numbers and names of their own", "[emulated][sites]") {
  auto const sites = all_sites();
  for (std::size_t i = 0; i < sites.size(); ++i) {
    CHECK(sites[i].site != SyncSite::none);
    for (std::size_t j = 0; j < i; ++j) {
      CHECK(sites[i].site != sites[j].site);
      CHECK(sites[i].name != sites[j].name);
    }
  }
  for (auto const& program : nanogpt::sync_sites) CHECK(program.site >= SyncSite::first_of_programs);
  for (auto const& library : fsdp::sync_sites) CHECK(fsdp::name(library.site) == library.name);
}

TEST_CASE("a dropped barrier is missed, whichever it is", "[emulated][sites]") {
  for (auto const& [site, site_name] : all_sites()) {
    CAPTURE(site_name);
    bool found = false;
    for (auto const& entry : entries) {
      if (entry.site != site) continue;
      found = true;
      auto const right = entry.run(Device{});
      bool missed = false;
      for (auto const schedule : {Schedule::greedy_forward, Schedule::greedy_reverse, Schedule::forward,
                                  Schedule::reverse, Schedule::shuffled}) {
        CAPTURE(name(schedule));
        Device device;
        device.options.schedule = schedule;
        REQUIRE(same(entry.run(device), right));
        std::int64_t dropped = 0;
        device.options.drop = site;
        device.options.dropped = &dropped;
        try {
          missed = !same(entry.run(device), right);
        } catch (Failure const&) {
          missed = true;
        }
        CHECK(dropped > 0);
        if (missed) break;
      }
      CHECK(missed);
    }
    if (!found) FAIL("no run is listed for barrier " << site_name);
  }
}
