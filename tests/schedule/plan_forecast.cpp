// SPDX-License-Identifier: Apache-2.0
// skip-sanitizers
// The time of a step on described hardware: docs/performance.md's formulas, shared links, and files that are refused.
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "fsdp/plan.hpp"
#include "tests/catch.hpp"
#include "tests/support/messages.hpp"
#include "tests/support/step_inputs.hpp"

namespace {

using fsdp::plan::Algorithm;
using fsdp::plan::Forecast;
using fsdp::plan::Hardware;
using fsdp::plan::Workload;
using fsdp::testing::equal_units;
using fsdp::testing::has;
using fsdp::testing::what;
using fsdp::testing::with_prefetch;

/// Everything but modules and the fixed cost of a collective is free.
Hardware only_launches(double seconds) {
  Hardware hardware;
  hardware.gpus_per_node = 4;
  hardware.flops = 1;
  hardware.memory_bandwidth = hardware.node_bandwidth = hardware.network_bandwidth =
      std::numeric_limits<double>::infinity();
  hardware.launch = seconds;
  hardware.shared_link = false;
  return hardware;
}
/// Modules compute in c forward and 2c backward.
Workload work(std::size_t uses, double c) {
  Workload load;
  load.uses.assign(uses, {{c, 0}, {2 * c, 0}});
  load.clips = false;
  return load;
}
Forecast forecast(fsdp::StepInput const& input, Workload const& load, Hardware const& hardware) {
  return fsdp::plan::forecast(fsdp::compile_program(input), input, load, hardware);
}

}  // namespace

TEST_CASE("plan: a step takes the times that performance.md derives, exactly") {
  for (int const units : {3, 4, 8, 13})
    for (double const m : {0.125, 0.5, 0.875, 1.25, 1.75}) {
      CAPTURE(units, m);
      auto const load = work(static_cast<std::size_t>(units), 1);
      auto const ahead = forecast(with_prefetch(equal_units(units, 4), 1, 1), load, only_launches(m));
      auto const forward = m < 1 ? m + units : units * m + 1;
      CHECK(ahead.step == forward + 2 * units + m);
      CHECK(ahead.compute == 3 * units);
      CHECK(ahead.exposed == ahead.step - ahead.compute);
      auto const none = forecast(with_prefetch(equal_units(units, 4), 0, 0), load, only_launches(m));
      CHECK(none.step == units * (m + 1) + (units - 1) * m + 2 * units + m);
    }
}

TEST_CASE("plan: what a step begins before the last one has ended counts at the end of a step") {
  auto const spans = fsdp::plan::detail::periodic({{8, 12}, {13, 15}, {9, 9.5}, {19, 20}}, 10, 20);
  std::vector<std::pair<double, double>> found;
  for (auto const& span : spans) found.emplace_back(span.begin, span.end);
  CHECK(found == std::vector<std::pair<double, double>>{{10, 12}, {13, 15}, {18, 20}});
}

TEST_CASE("plan: collectives that share a link take its time one after the other, and not their latency") {
  fsdp::SharedLink link;
  CHECK(link.take(2, 3) == 5);
  CHECK(link.take(0, 1) == 1);
  CHECK(link.take(0.5, 2) == 6);  // 1 to 2, then 5 to 6
  CHECK(link.take(0, 1) == 7);
  CHECK(link.take(9, 0) == 9);
  CHECK(link.take(8, 1) == 9);
  CHECK(link.take(6.5, 2) == 10);

  auto const input = with_prefetch(equal_units(6, 4), 1, 1);
  auto const load = work(6, 1);
  auto hardware = only_launches(0);
  hardware.node_bandwidth = 1024 * 4 * 0.75 / 1.25;  // a collective of a unit in fp32: 1.25
  auto const apart = forecast(input, load, hardware);
  hardware.shared_link = true;
  auto const shared = forecast(input, load, hardware);
  // Backward has a gather and a reduction for each unit, 2.5 in 2 of compute.
  CHECK(shared.step > apart.step);
  hardware.node_bandwidth = std::numeric_limits<double>::infinity();
  hardware.launch = 1.25;
  auto const latency = forecast(input, load, hardware);
  hardware.shared_link = false;
  CHECK(latency.step == forecast(input, load, hardware).step);
}

TEST_CASE("plan: a collective's time by algorithm, nodes and stride") {
  using fsdp::plan::collective_cost;
  using fsdp::step::Primitive;
  Hardware hardware;
  hardware.gpus_per_node = 8;
  hardware.node_bandwidth = 64;
  hardware.network_bandwidth = 4;
  hardware.node_latency = 1;
  hardware.network_latency = 16;
  hardware.launch = 128;
  auto const ring = collective_cost(hardware, Primitive::all_gather, {32}, Algorithm::ring);
  CHECK(ring.fixed == 128 + 3 * 16 + 4 * 7 * 1);
  CHECK(ring.per_byte == 31.0 / 32 / 32);  // 8 GPUs of a node send at 4
  auto const tree = collective_cost(hardware, Primitive::all_gather, {32}, Algorithm::tree);
  CHECK(tree.fixed == 128 + 2 * 16 + 7 * 1);
  CHECK(tree.per_byte == ring.per_byte);
  auto const node = collective_cost(hardware, Primitive::reduce_scatter, {8}, Algorithm::ring);
  CHECK(node.fixed == 128 + 7);
  CHECK(node.per_byte == 7.0 / 8 / 64);
  auto const strided = collective_cost(hardware, Primitive::all_reduce, {4, 8}, Algorithm::ring);
  CHECK(strided.fixed == 128 + 2 * 3 * 16);
  CHECK(strided.per_byte == 2 * 3.0 / 4 / 4);
  auto const pairs = collective_cost(hardware, Primitive::all_reduce, {8, 4}, Algorithm::ring);  // two of a node
  CHECK(pairs.per_byte == 2 * 7.0 / 8 / 8);
  CHECK(collective_cost(hardware, Primitive::all_gather, {1}, Algorithm::ring).fixed == 0);
}

TEST_CASE("plan: measured values replace those of a hardware file") {
  using fsdp::plan::with_values;
  CHECK(with_values("", {{"flops", 2.5}, {"launch", 1e-5}}) == "flops = 2.5\nlaunch = 1e-05\n");
  CHECK(with_values("# flops = 1\n flops = 1 # old\nmemory = 3", {{"flops", 2}}) ==
        "# flops = 1\nflops = 2\nmemory = 3\n");
}

TEST_CASE("plan: hardware files") {
  using fsdp::plan::read_hardware;
  std::string const good =
      "# a comment\ngpus_per_node = 8\nmemory = 80e9  # bytes\nflops = 989e12\nefficiency = 0.6\n"
      "memory_bandwidth = 3e12\nnode_bandwidth=450e9\nnetwork_bandwidth = 50e9\nnode_latency = 0\n\n"
      "network_latency = 1e-5\nlaunch = 1e-5\r\nall_reduce = tree\nshared_link = false\njitter = 1e-3";
  auto const hardware = read_hardware(good, "file");
  CHECK(hardware.gpus_per_node == 8);
  CHECK(hardware.memory == 80e9);
  CHECK(hardware.launch == 1e-5);
  CHECK(hardware.all_reduce == Algorithm::tree);
  CHECK(hardware.all_gather == Algorithm::nccl);
  CHECK_FALSE(hardware.shared_link);
  CHECK(hardware.jitter == 1e-3);
  auto const refused = [](std::string const& text) {
    return what<fsdp::ConfigError>([&] { static_cast<void>(read_hardware(text, "file")); });
  };
  // Each line without its value, with a wrong one, and twice.
  std::size_t begin = 0;
  for (int line = 1; begin < good.size(); ++line) {
    auto const end = std::min(good.find('\n', begin), good.size());
    auto const own = good.substr(begin, end - begin);
    if (auto const equals = own.find('='); equals != std::string::npos) {
      auto const name = own.substr(0, equals);
      for (auto const* const value : {"", "-1", "inf", "-inf", "nan", "1e999", "1e31", "much", "1 2", "0x"}) {
        CAPTURE(line, own, value);
        auto const text = good.substr(0, begin) + name + "= " + value + good.substr(end);
        CHECK(has(refused(text), "file: line " + std::to_string(line) + ": '"));
      }
      CAPTURE(own);
      auto const twice = good + "\n" + own;
      CHECK(has(refused(twice), "file: line 16: '"));
      CHECK(has(refused(twice), "twice"));
    }
    begin = end + 1;
  }
  for (auto const* const name : {"gpus_per_node", "memory", "flops", "efficiency", "memory_bandwidth", "node_bandwidth",
                                 "network_bandwidth", "node_latency", "network_latency", "launch"}) {
    CAPTURE(name);
    auto const at = good.find(std::string("\n") + name) + 1;
    auto const without = good.substr(0, at) + "#" + good.substr(at);
    CHECK(has(refused(without), "without a line '" + std::string(name) + " = VALUE'"));
  }
  CHECK(has(refused(good + "\nspeed = 3"), "line 16: there is no value called 'speed'"));
  CHECK(has(refused(good + "\nspeed"), "line 16: expected 'name = value'"));
  CHECK(has(refused("memory = 0"), "line 1: 'memory': expected a number from 1 to 1e30, got '0'"));
  for (std::string const name : {"memory", "flops", "memory_bandwidth", "node_bandwidth", "network_bandwidth"})
    CHECK(has(refused(name + " = 1e-300"), "'" + name + "': expected a number from 1 to 1e30"));
  for (std::string const name : {"node_latency", "network_latency", "launch", "step_overhead", "jitter"})
    CHECK(has(refused(name + " = 1e7"), "'" + name + "': expected a number from 0 to 1e6, got '1e7'"));
  CHECK(has(refused("efficiency = 1e-300"), "'efficiency': expected a number from 1e-6 to 1"));
  CHECK(has(refused("efficiency = 1.5"), "expected a number from 1e-6 to 1, got '1.5'"));
  CHECK(has(refused("gpus_per_node = 1.5"), "a whole number"));
  auto const nodes = what<fsdp::ConfigError>([&] { fsdp::plan::expect_whole_nodes(hardware, 20); });
  CHECK(has(nodes, "20 GPUs are not a multiple of the 8 GPUs of a node"));
  CHECK_NOTHROW(fsdp::plan::expect_whole_nodes(hardware, 4));
}

TEST_CASE("plan: times are finite with the lowest and the highest values of a hardware file") {
  using fsdp::plan::read_hardware;
  auto const file = [](std::string const& rate, std::string const& efficiency, std::string const& seconds) {
    std::string text = "gpus_per_node = 2\nefficiency = " + efficiency + "\n";
    for (auto const* const name : {"memory", "flops", "memory_bandwidth", "node_bandwidth", "network_bandwidth"})
      text += std::string(name) + " = " + rate + "\n";
    for (auto const* const name : {"node_latency", "network_latency", "launch", "step_overhead", "jitter"})
      text += std::string(name) + " = " + seconds + "\n";
    return read_hardware(text, "file");
  };
  auto const load = work(4, 1e24);
  for (auto const& hardware : {file("1", "1e-6", "1e6"), file("1e30", "1", "0")}) {
    auto const time = forecast(with_prefetch(equal_units(4, 4), 1, 1), load, hardware);
    for (auto const seconds : {time.step, time.compute, time.communication, time.exposed}) {
      CHECK(std::isfinite(seconds));
      CHECK(seconds >= 0);
    }
    CHECK(time.step > 0);
  }
}
