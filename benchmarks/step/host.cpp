// SPDX-License-Identifier: Apache-2.0
// The step, and its kernels, on the host.
#include <fmt/format.h>

#include <fstream>
#include <stdexcept>
#include <string>

#include "fsdp/host.hpp"
#include "kernels.hpp"
#include "run.hpp"
#include "step.hpp"
#include "transformer/math/gemm_host.hpp"

namespace bench {

namespace {

/// "host (Intel(R) Xeon(R) ...), one thread of compute".
std::string describe_host() {
  std::ifstream stream("/proc/cpuinfo");
  for (std::string text; std::getline(stream, text);)
    if (auto const colon = text.find(": "); text.starts_with("model name") && colon != std::string::npos)
      return fmt::format("host ({}), one thread of compute", text.substr(colon + 2));
  return "host, one thread of compute";
}

}  // namespace

void run_host(StepSettings const& settings) {
  fsdp::host::Device const device;
  if (settings.dtype == "bfloat16") {
#if TRANSFORMER_HAVE_ONEDNN
    if (settings.kernels) throw std::invalid_argument("--kernels on the host: expected --dtype=float32");
    return run_step<fsdp::Bf16>(device, describe_host(), host_cache(), settings);
#else
    throw std::invalid_argument("--dtype=bfloat16: this program was built without oneDNN");
#endif
  }
  if (settings.kernels) return run_kernels<float>(device, describe_host(), host_cache(), settings);
  run_step<fsdp::Fp32>(device, describe_host(), host_cache(), settings);
}

}  // namespace bench
