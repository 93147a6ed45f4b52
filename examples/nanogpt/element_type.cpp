// SPDX-License-Identifier: Apache-2.0
#include "element_type.hpp"

#include <algorithm>
#include <chrono>
#include <exception>
#include <utility>

#include "fsdp/error.hpp"
#include "fsdp/host/device.hpp"
#include "gemm_host.hpp"
#include "peak.hpp"
#include "run_state.hpp"
#if NANOGPT_HAVE_ONEDNN
#include "bf16_products.hpp"
#endif

namespace nanogpt {
namespace {

/// Why this program computes nothing in bf16 on this processor; empty if it does.
std::string why_no_bf16() {
#if NANOGPT_HAVE_ONEDNN
  if (!bf16_units().empty()) return {};
  return "this processor has no units for bf16 (AMX or AVX-512 BF16) that oneDNN may use";
#else
  return "this program was built without oneDNN, which bf16 on cpu needs (on Debian: libdnnl-dev)";
#endif
}

/// The type that the run which is to be resumed was saved in; empty if there is none, or it does not say. What is wrong
/// with it all ranks find out together, when they open it.
std::string type_of_resumed(Job const& job) {
  auto const& from = job.settings.init_from;
  if (job.command != Command::train || (from != "resume" && from != "auto")) return {};
  try {
    auto const run = find_run(job.settings.out_dir);
    return run ? run->dtype : std::string();
  } catch (std::exception const&) {
    return {};
  }
}

/// [Note: Rates that are compared are measured in turns]
/// Other work on the machine comes and goes within tenths of a second, and takes up to half of a rate. Measured one
/// after the other, one type has met it and the other has not. So they take turns of 10 ms, and the best of each
/// counts.
ProductRates measure_rates(fsdp::host::Device const& device) {
  ProductRates rates{0, 0, why_no_bf16()};
  if (!rates.why_no_bf16.empty()) return rates;
#if NANOGPT_HAVE_ONEDNN
  constexpr int turns = 7;
  constexpr std::chrono::milliseconds turn{10};
  for (int i = 0; i < turns; ++i) {
    rates.fp32 = std::max(rates.fp32, measure_host_rate<float>(device, turn));
    rates.bf16 = std::max(rates.bf16, measure_host_rate<fsdp::bf16>(device, turn));
  }
#else
  static_cast<void>(device);
#endif
  return rates;
}

}  // namespace

void choose_dtype(Job& job) {
  bool const host = job.device == "cpu";
  auto const& asked = job.settings.dtype;
  if (asked == "float16")
    fsdp::fail<fsdp::ConfigError>(
        "setting 'dtype': float16 needs loss scaling, which nanogpt does not have yet: expected bfloat16 or float32, "
        "got float16");
  std::string const otherwise = host ? "float32" : "bfloat16";
  auto const saved = type_of_resumed(job);
  bool const free = asked.empty() || asked == "fastest";
  job.dtype = !free            ? asked
              : !saved.empty() ? saved
              : asked.empty()  ? otherwise
                               : std::string(host ? "fastest" : "bfloat16");
  if (free && !saved.empty() && (saved != otherwise || asked == "fastest"))
    job.dtype_note = fmt::format("computes in {}, as the run in '{}' has so far", saved, job.settings.out_dir);
  if (host && job.dtype == "bfloat16") {
    if (auto const why = why_no_bf16(); !why.empty()) {
      job.dtype = "float32";
      job.dtype_note = why + ": computing in float32";
    }
  }
  if (!saved.empty() && saved != job.dtype)
    job.dtype_note += fmt::format("{}the run in '{}' has computed in {} so far, and goes on in {}",
                                  job.dtype_note.empty() ? "" : "; ", job.settings.out_dir, saved, job.dtype);
}

void take_fastest_type(Job& job, ExchangeTexts const& exchange) {
  if (job.dtype != "fastest") return;
  auto const rates = slowest_of(exchange(pack(measure_rates(fsdp::host::Device{job.threads}))));
  job.dtype = fastest_type(rates);
  job.dtype_note = describe(rates);
}

}  // namespace nanogpt
