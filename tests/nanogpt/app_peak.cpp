// SPDX-License-Identifier: Apache-2.0
// The reference of utilisation: the table of devices, the peak of ranks together, and that disturbed measurements of
// the host's do not count.
// skip-sanitizers
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <string>
#include <vector>

#include "fsdp/host.hpp"
#include "fsdp/local.hpp"
#include "tests/catch.hpp"
#include "transformer/math/gemm_host.hpp"
#include "transformer/math/peak.hpp"

namespace {
std::atomic<int> measured{0};
}
namespace transformer {
/// The peak of one rank; the trainer's own measures OpenBLAS.
double measure_sgemm_peak(int, std::chrono::milliseconds) {
  ++measured;
  return 3e9;
}
}  // namespace transformer

TEST_CASE("devices are found by name, as the driver writes it", "[nanogpt]") {
  auto const peak = [](char const* name) { return std::llround(transformer::data_sheet_bf16_peak(name) / 1e10); };
  CHECK(peak("NVIDIA H200") == 98940);
  CHECK(peak("cuda:0 NVIDIA H200 (compute 9.0, 139.8 GiB)") == 98940);
  CHECK(peak("NVIDIA H200 NVL") == 83550);
  CHECK(peak("NVIDIA GH200 480GB") == 98940);
  CHECK(peak("NVIDIA H100 80GB HBM3") == 98940);
  CHECK(peak("NVIDIA H100 PCIe") == 75650);
  CHECK(peak("NVIDIA H100 NVL") == 83550);
  CHECK(peak("NVIDIA A100-SXM4-80GB") == 31200);
  CHECK(peak("NVIDIA A100 80GB PCIe") == 31200);
  CHECK(peak("NVIDIA L40S") == 36200);
  CHECK(peak("NVIDIA L4") == 12100);
  CHECK(peak("NVIDIA A10") == 12500);
  CHECK(peak("NVIDIA B200") == 225000);
}

TEST_CASE("other devices, and parts of one, are not taken for those", "[nanogpt]") {
  for (char const* const name : {"", "NVIDIA RTX A1000", "NVIDIA RTX A3000 Laptop GPU", "NVIDIA H20", "NVIDIA L40",
                                 "NVIDIA A10G", "NVIDIA GB200", "NVIDIA GeForce RTX 4090", "NVIDIA H200 MIG 1g.18gb"}) {
    CAPTURE(name);
    CHECK(transformer::data_sheet_bf16_peak(name) == 0);
  }
}

TEST_CASE("host ranks have a peak each, measured or given", "[nanogpt]") {
  std::vector<double> peaks(3);
  fsdp::local::run(3, fsdp::host::Device{}, [&](fsdp::local::Communicator<fsdp::host::Device> world) {
    peaks[static_cast<std::size_t>(world.rank())] = transformer::measure_peak<float>(world).flops;
  });
  CHECK(peaks == std::vector<double>(3, 9e9));
  CHECK(measured == 3 * 2);  // the second agrees with the first
  fsdp::local::run(3, fsdp::host::Device{}, [&](fsdp::local::Communicator<fsdp::host::Device> world) {
    peaks[static_cast<std::size_t>(world.rank())] = transformer::measure_peak<float>(world, 5e9).flops;
  });
  CHECK(peaks == std::vector<double>(3, 15e9));
  CHECK(measured == 3 * 2);  // what is given is not measured
}

TEST_CASE("a rate is the highest of measurements that stand apart, until two agree", "[nanogpt]") {
  struct Outcome {
    double rate;
    std::size_t measurements;
  };
  auto const highest = [](std::vector<double> const& rates) {
    std::size_t measurements = 0, rests = 0;
    double const rate = transformer::highest_rate([&] { return rates.at(measurements++); }, [&] { ++rests; });
    CHECK(rests + 1 == measurements);
    return Outcome{rate, measurements};
  };
  auto const is = [](Outcome const& found, double rate, std::size_t measurements) {
    CHECK(found.rate == rate);
    CHECK(found.measurements == measurements);
  };
  is(highest({100, 99.5}), 100, 2);
  is(highest({70, 100, 99.5}), 100, 3);          // the first was disturbed
  is(highest({70, 70.1, 100}), 70.1, 2);         // so was the machine all the time: raise() is for that
  is(highest({100, 60, 98.9, 80, 99}), 100, 5);  // 98.9 is no agreement, 99 is
  is(highest({60, 100, 70, 80, 90}), 100, 5);    // never two alike: five are enough
}

TEST_CASE("a peak rises with what ranks measure later, and never falls", "[nanogpt]") {
  std::vector<std::vector<double>> peaks(2);
  fsdp::local::run(2, fsdp::host::Device{}, [&](fsdp::local::Communicator<fsdp::host::Device> world) {
    auto peak = transformer::measure_peak<float>(world);  // 3e9 each
    auto& seen = peaks[static_cast<std::size_t>(world.rank())];
    auto const note = [&](bool risen) { seen.insert(seen.end(), {peak.flops, risen ? 1.0 : 0.0}); };
    note(transformer::raise(peak, world, 0));                                 // nothing was measured
    note(transformer::raise(peak, world, world.rank() == 0 ? 2e9 : 3.01e9));  // by less than 1 %, of one rank
    note(transformer::raise(peak, world, world.rank() == 0 ? 5e9 : 1e9));
    note(transformer::raise(peak, world, 4e9));
  });
  std::vector<double> const expected{6e9, 0, 6.01e9, 0, 8.01e9, 1, 9e9, 1};
  CHECK(peaks == std::vector(2, expected));
}
