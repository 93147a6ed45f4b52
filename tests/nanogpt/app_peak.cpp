// SPDX-License-Identifier: Apache-2.0
// What utilisation is relative to: the table of devices, and the peak of ranks together.
#include <cmath>
#include <vector>

#include "fsdp/comm/local.hpp"
#include "fsdp/host/device.hpp"
#include "gemm_host.hpp"
#include "peak.hpp"
#include "tests/catch.hpp"

namespace nanogpt {
/// Of one rank; the trainer's own measures OpenBLAS.
double measure_sgemm_peak() { return 3e9; }
}  // namespace nanogpt

TEST_CASE("devices are found by name, as the driver writes it", "[nanogpt]") {
  auto const peak = [](char const* name) { return std::llround(nanogpt::data_sheet_bf16_peak(name) / 1e10); };
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
    CHECK(nanogpt::data_sheet_bf16_peak(name) == 0);
  }
}

TEST_CASE("host ranks have a peak each", "[nanogpt]") {
  std::vector<double> peaks(3);
  fsdp::local::run(3, fsdp::host::Device{}, [&](fsdp::local::Communicator<fsdp::host::Device> world) {
    peaks[static_cast<std::size_t>(world.rank())] = nanogpt::measure_peak<float>(world).flops;
  });
  CHECK(peaks == std::vector<double>(3, 9e9));
}
