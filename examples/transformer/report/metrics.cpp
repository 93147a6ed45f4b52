// SPDX-License-Identifier: Apache-2.0
// Metrics of a run.
#include "transformer/report/metrics.hpp"

#include <fmt/format.h>

#include <cerrno>
#include <cmath>
#include <exception>
#include <fstream>
#include <system_error>
#include <utility>

#include "fsdp/error.hpp"
#include "transformer/launch/program.hpp"

namespace transformer {
namespace {

std::string json_number(double value) { return std::isfinite(value) ? fmt::format("{:.17g}", value) : "null"; }

/// A value that is never negative; -1 says that it is not known.
std::string json_known(double value) { return value < 0 ? "null" : json_number(value); }

}  // namespace

std::string with_commas(std::int64_t value) {
  auto text = fmt::format("{}", value);
  std::size_t const first = value < 0 ? 1 : 0;
  for (auto at = text.size(); at > first + 3; at -= 3) text.insert(at - 3, 1, ',');
  return text;
}

std::string loss_text(double loss) { return std::isnan(loss) ? "nan" : fmt::format("{:.4f}", loss); }

std::string line(IterationReport const& r) {
  auto const mfu = r.mfu < 0 ? std::string("-") : fmt::format("{:.2f}%", r.mfu * 100);
  auto const norm = r.gradient_norm < 0 ? std::string() : fmt::format(" norm {},", loss_text(r.gradient_norm));
  return fmt::format(
      "iter {}: loss {}, time {:.2f}ms, mfu {},{} lr {:.2e}, total time {:.2f}s, tokens/s {}, mem {:.2f}GB",
      r.iteration, loss_text(r.loss), r.seconds * 1e3, mfu, norm, r.learning_rate, r.total_seconds,
      with_commas(std::llround(r.tokens_per_second)), static_cast<double>(r.memory_bytes) / 1e9);
}

std::string line(EvaluationReport const& r) {
  return fmt::format("step {}: train loss {}, val loss {}", r.iteration, loss_text(r.train_loss),
                     loss_text(r.val_loss));
}

std::string json(IterationReport const& r) {
  return fmt::format(
      R"({{"kind":"iter","iter":{},"loss":{},"lr":{},"time_ms":{},"total_time_s":{},"tokens_per_s":{},"mfu":{},"grad_norm":{},"mem_bytes":{}}})",
      r.iteration, json_number(r.loss), json_number(r.learning_rate), json_number(r.seconds * 1e3),
      json_number(r.total_seconds), json_number(r.tokens_per_second), json_known(r.mfu), json_known(r.gradient_norm),
      r.memory_bytes);
}

std::string json(EvaluationReport const& r) {
  return fmt::format(R"({{"kind":"eval","iter":{},"train_loss":{},"val_loss":{},"lr":{},"mfu":{}}})", r.iteration,
                     json_number(r.train_loss), json_number(r.val_loss), json_number(r.learning_rate),
                     json_known(r.mfu));
}

JsonLog::JsonLog(std::string_view setting, std::string const& file) : setting_(setting), name_(file) {
  if (file.empty()) return;
  file_ = std::fopen(file.c_str(), "w");
  if (file_ == nullptr) fsdp::fail<fsdp::ConfigError>("{}", failure());
}

JsonLog::~JsonLog() {
  if (file_ != nullptr) std::fclose(file_);
}

bool JsonLog::write(std::string_view object) noexcept {
  if (put(object)) return true;
  if (std::exchange(warned_, true)) return false;
  try {
    auto const text =
        fmt::format("{}: warning: {}; training goes on, but lines are missing in this file\n", program_name, failure());
    std::fwrite(text.data(), 1, text.size(), stderr);
  } catch (std::exception const&) {  // no memory for a warning
  }
  return false;
}

void JsonLog::write_or_fail(std::string_view object) {
  if (!put(object)) fsdp::fail<fsdp::ResourceError>("{}", failure());
}

/// @return whether all of it is with the system; else errno says why
bool JsonLog::put(std::string_view object) noexcept {
  if (file_ == nullptr) return true;
  bool const taken = std::fwrite(object.data(), 1, object.size(), file_) == object.size();
  return taken && std::fputc('\n', file_) != EOF && std::fflush(file_) == 0;
}

/// @pre errno says why
std::string JsonLog::failure() const {
  return fmt::format("setting '{}': '{}' cannot be written: {}", setting_, name_,
                     std::generic_category().message(errno));
}

std::int64_t pss_bytes() {
  std::ifstream stream("/proc/self/smaps_rollup");
  for (std::string text; std::getline(stream, text);)
    if (text.starts_with("Pss:")) return std::stoll(text.substr(4)) * 1024;
  return 0;
}

}  // namespace transformer
