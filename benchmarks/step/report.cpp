// SPDX-License-Identifier: Apache-2.0
// The tables of the step benchmark.
#include "report.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <ctime>
#include <fstream>
#include <nlohmann/json.hpp>

#include "benchmarks/plan/hardware.hpp"
#include "fsdp/error.hpp"

namespace bench {

namespace {

using Json = nlohmann::ordered_json;

std::string date() {
  std::time_t const now = std::time(nullptr);
  char text[32] = {};
  std::strftime(text, sizeof text, "%Y-%m-%dT%H:%M:%SZ", std::gmtime(&now));
  return text;
}

void print_head(StepSettings const& s, Roof const& roof, std::string const& device) {
  fmt::print("# {}, {}\n", device, date());
  fmt::print("# roof: copy {:.1f} GB/s on {:.1f} MiB (4 x the cache), {} products {:.2f} TFLOP/s at {}^3\n",
             roof.copy_bytes * 1e-9, static_cast<double>(roof.working_set) / 1048576.0, s.dtype,
             roof.gemm_flops * 1e-12, roof.gemm_size);
}

Json json_head(StepSettings const& s, Roof const& roof, std::string const& device) {
  return {{"framework", "fsdp"},
          {"device", device},
          {"date", date()},
          {"model", s.model},
          {"n_layer", s.n_layer},
          {"n_head", s.n_head},
          {"n_embd", s.n_embd},
          {"batch", s.batch},
          {"block", s.block},
          {"accumulate", s.accumulate},
          {"dtype", s.dtype},
          {"copy_bytes_per_s", roof.copy_bytes},
          {"gemm_flops_per_s", roof.gemm_flops},
          {"working_set_bytes", roof.working_set}};
}

void write_hardware(StepSettings const& settings, Roof const& roof) {
  if (settings.hardware.empty()) return;
  auto const peak = roof.peak_flops > 0 ? roof.peak_flops : roof.gemm_flops;
  bench::write_hardware(
      settings.hardware,
      {{"flops", peak}, {"efficiency", std::min(1.0, roof.gemm_flops / peak)}, {"memory_bandwidth", roof.copy_bytes}});
}

void write(StepSettings const& settings, Json const& root) {
  if (settings.json.empty()) return;
  std::ofstream file(settings.json);
  file << root.dump() << '\n';
  file.close();
  if (!file) fsdp::fail<fsdp::ResourceError>("cannot write '{}'", settings.json);
}

std::string percent(double part, double whole) { return whole > 0 ? fmt::format("{:.1f}%", 100 * part / whole) : "-"; }

/// One row of the table of classes; times in milliseconds of a step.
void print_row(std::string_view label, std::string const& launches, double ms, double step_ms, double need_ms) {
  fmt::print("  {:<22} {:>9} {:>11.4f} {:>8} {:>11.4f} {:>9}\n", label, launches, ms, percent(ms, step_ms), need_ms,
             percent(need_ms, ms));
}

Json print_classes(StepSettings const& settings, Roof const& roof, StepFigures const& f) {
  auto const steps = static_cast<double>(settings.profiled);
  double const step_ms = f.profiled_seconds * 1e3;
  std::array<double, class_count> ms{};
  std::array<std::int64_t, class_count> launches{};
  for (auto const& kernel : f.kernels) {
    ms[static_cast<std::size_t>(kernel.of)] += kernel.seconds / steps * 1e3;
    launches[static_cast<std::size_t>(kernel.of)] += kernel.launches;
  }
  fmt::print(
      "#\n# a step by kernel class ({} profiled steps of {:.4f} ms, {:.2f} x the plain step; marks add {:.2f} us per "
      "launch)\n",
      settings.profiled, step_ms, f.profiled_seconds / f.median_seconds, roof.mark_seconds * 1e6);
  fmt::print("# need: minimum time, the larger of FLOP / product rate and bytes / copy rate\n");
  fmt::print("# {:<22} {:>9} {:>11} {:>8} {:>11} {:>9}\n", "class", "launches", "ms", "share", "need ms", "of roof");
  auto rows = Json::array();
  double sum_ms = 0, sum_need = 0;
  for (std::size_t i = 0; i < class_count; ++i) {
    double const need_ms = f.needs[i].seconds(roof) * 1e3;
    print_row(class_names[i], fmt::format("{}", launches[i] / settings.profiled), ms[i], step_ms, need_ms);
    rows.push_back({{"class", class_names[i]},
                    {"launches", launches[i] / settings.profiled},
                    {"ms", ms[i]},
                    {"need_ms", need_ms},
                    {"need_flop", f.needs[i].flop},
                    {"need_bytes", f.needs[i].bytes}});
    sum_ms += ms[i];
    sum_need += need_ms;
  }
  print_row("sum", "", sum_ms, step_ms, sum_need);
  fmt::print("  {:<22} {:>9} {:>11.4f} {:>8}\n", "rest of the step", "", step_ms - sum_ms,
             percent(step_ms - sum_ms, step_ms));
  fmt::print("#\n# kernels of class 'other':");
  bool none = true;
  for (auto const& kernel : f.kernels) {
    if (kernel.of != KernelClass::other) continue;
    fmt::print("{} {} {:.4f} ms", none ? "" : ",", kernel.kernel, kernel.seconds / steps * 1e3);
    none = false;
  }
  fmt::print("{}\n", none ? " none" : "");
  if (f.lost > 0) fmt::print("# {} launches exceeded the profile's capacity and are counted in 'rest'\n", f.lost);
  return rows;
}

}  // namespace

void report_step(StepSettings const& settings, Roof const& roof, StepFigures const& f) {
  auto const tokens = static_cast<double>(settings.batch * settings.block * settings.accumulate);
  double const mfu = f.flop / f.seconds / roof.peak_flops;
  print_head(settings, roof, f.device);
  fmt::print("# {}: {:.1f}M parameters, {} x {} tokens, {} micro-step{}, {}; {} steps after {}\n", settings.model,
             static_cast<double>(f.parameters) * 1e-6, settings.batch, settings.block, settings.accumulate,
             settings.accumulate == 1 ? "" : "s", settings.dtype, settings.timed, settings.burn_in);
  fmt::print("time per step: {:.4f} ms (median {:.4f})\n", f.seconds * 1e3, f.median_seconds * 1e3);
  fmt::print("tokens/s: {:.1f}\n", tokens / f.seconds);
  fmt::print("MFU: {:.2f}% of {:.2f} TFLOP/s ({})\n", mfu * 100, roof.peak_flops * 1e-12, roof.peak_source);
  fmt::print("memory: {:.3f} GB by the account, {:.3f} GB at the peak\n", static_cast<double>(f.account_bytes) * 1e-9,
             static_cast<double>(f.peak_bytes) * 1e-9);
  fmt::print("loss: {:.4f}\n", f.loss);

  write_hardware(settings, roof);
  auto root = json_head(settings, roof, f.device);
  root["mode"] = "step";
  root["parameters"] = f.parameters;
  root["time_ms"] = f.seconds * 1e3;
  root["median_ms"] = f.median_seconds * 1e3;
  root["tokens_per_s"] = tokens / f.seconds;
  root["mfu"] = mfu;
  root["peak_flops_per_s"] = roof.peak_flops;
  root["peak_source"] = roof.peak_source;
  root["account_bytes"] = f.account_bytes;
  root["peak_bytes"] = f.peak_bytes;
  root["loss"] = f.loss;
  if (settings.profiled > 0) {
    root["profiled_ms"] = f.profiled_seconds * 1e3;
    root["classes"] = print_classes(settings, roof, f);
    for (auto const& kernel : f.kernels)
      root["kernels"].push_back({{"kernel", kernel.kernel},
                                 {"class", name(kernel.of)},
                                 {"launches", kernel.launches / settings.profiled},
                                 {"ms", kernel.seconds / static_cast<double>(settings.profiled) * 1e3}});
  }
  std::fflush(stdout);
  write(settings, root);
}

void report_kernels(StepSettings const& settings, Roof const& roof, std::string const& device,
                    std::vector<KernelFigures> const& kernels) {
  print_head(settings, roof, device);
  fmt::print("# each kernel alone, with a cold cache; median of {}; bytes: the minimum that it moves\n",
             settings.repeats);
  fmt::print("# {:<34} {:>11} {:>10} {:>10} {:>9} {:>9}\n", "kernel", "us", "MB", "GB/s", "of copy", "TFLOP/s");
  auto root = json_head(settings, roof, device);
  root["mode"] = "kernels";
  for (auto const& k : kernels) {
    double const rate = k.bytes / k.seconds;
    bool const computes = k.flop > 0;
    fmt::print("  {:<34} {:>11.2f} {:>10.2f} {:>10.1f} {:>9} {:>9}\n", k.kernel, k.seconds * 1e6, k.bytes * 1e-6,
               rate * 1e-9, percent(rate, roof.copy_bytes),
               computes ? fmt::format("{:.2f}", k.flop / k.seconds * 1e-12) : "-");
    root["rows"].push_back({{"kernel", k.kernel},
                            {"us", k.seconds * 1e6},
                            {"bytes", k.bytes},
                            {"of_copy", rate / roof.copy_bytes},
                            {"tflops", computes ? Json(k.flop / k.seconds * 1e-12) : Json()}});
  }
  std::fflush(stdout);
  write(settings, root);
}

}  // namespace bench
