// SPDX-License-Identifier: Apache-2.0
// Writing OUT/log.jsonl.
#include "transformer/report/log_lines.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <ctime>
#include <exception>
#include <fstream>
#include <nlohmann/json.hpp>
#include <random>
#include <system_error>
#include <utility>

#include "fsdp/error.hpp"
#include "fsdp/json.hpp"

namespace transformer {
namespace {

using Json = nlohmann::ordered_json;

/// As few digits as give the number back; JSON has no infinities.
std::string number(double value) { return std::isfinite(value) ? fmt::format("{}", value) : "null"; }

/// Texts that are not UTF-8, such as folders' names, get replacement characters.
std::string dumped(Json const& object) { return object.dump(-1, ' ', false, Json::error_handler_t::replace); }

/// Now, in UTC.
std::string time_text() {
  std::time_t const now = std::time(nullptr);
  std::tm utc{};
  ::gmtime_r(&now, &utc);
  return fmt::format("{:04}-{:02}-{:02}T{:02}:{:02}:{:02}Z", utc.tm_year + 1900, utc.tm_mon + 1, utc.tm_mday,
                     utc.tm_hour, utc.tm_min, utc.tm_sec);
}

}  // namespace

RankMemory rank_memory(fsdp::MemoryAccount const& account) {
  RankMemory memory;
  for (std::size_t tag = 0; tag < memory.reserved.size(); ++tag)
    memory.reserved[tag] = account.reserved(static_cast<fsdp::MemoryTag>(tag));
  memory.peak_state = account.peak_live_state();
  return memory;
}

std::string pack(RankMemory const& memory) {
  std::string text = "{";
  for (std::size_t tag = 0; tag < memory.reserved.size(); ++tag)
    text += fmt::format("\"{}\":{},", fsdp::memory_tag_names[tag], memory.reserved[tag]);
  return text + fmt::format("\"peak_state\":{}}}", memory.peak_state);
}

std::string const& run_id() {
  static std::string const id = fmt::format("{}-{}-{:x}", time_text(), ::getpid(), std::random_device{}());
  return id;
}

bool was_abandoned(std::filesystem::path const& log, std::string_view id) {
  std::error_code ignored;
  if (id.empty() || !std::filesystem::is_regular_file(log, ignored)) return false;
  std::ifstream stream(log, std::ios::binary);
  std::string last;
  for (std::string line; std::getline(stream, line);)
    if (line.starts_with(R"({"kind":"run")")) last = std::move(line);
  auto const start = fsdp::checkpoint::parse_json<Json>(last);
  return start.is_object() && start.value("resumed", Json(true)) == false && start.value("id", Json(id)) != id;
}

std::string with_run_id(std::string trace) {
  if (trace.starts_with('{')) trace.insert(1, fmt::format(R"("otherData":{{"run":"{}"}},)", run_id()));
  return trace;
}

std::string log_line(RunHeader const& header) {
  Json settings = Json::object(), given = Json::array(), environment = Json::object(), plan = Json::object(),
       model = Json::object();
  for (auto const& setting : header.settings) {
    settings[std::string(setting.name)] = setting.value;
    if (setting.given) given.push_back(setting.name);
  }
  for (auto const& [name, text] : header.environment) environment[name] = text;
  for (auto const& [tag, bytes] : header.plan) plan[std::string(fsdp::name(tag))] = bytes;
  for (auto const& [name, size] : header.model) model[name] = size;
  return dumped({{"kind", "run"},
                 {"id", run_id()},
                 {"started", time_text()},
                 {"iter", header.iteration},
                 {"resumed", header.resumed},
                 {"from", header.from.empty() ? Json(nullptr) : Json(header.from)},
                 {"ranks", header.ranks},
                 {"model", model},
                 {"settings", settings},
                 {"given", given},
                 {"environment", environment},
                 {"program", header.program},
                 {"plan", plan},
                 {"trace", header.trace.empty() ? Json(nullptr) : Json(header.trace.string())}});
}

std::string log_line(IterationReport const& r) {
  return fmt::format(
      R"({{"kind":"iter","iter":{},"loss":{},"lr":{},"grad_norm":{},"time_ms":{:.6g},"tokens_per_s":{:.6g},"mfu":{:.6g},"total_time_s":{:.6f}}})",
      r.iteration, number(r.loss), number(r.learning_rate), r.gradient_norm < 0 ? "null" : number(r.gradient_norm),
      r.seconds * 1e3, r.tokens_per_second, r.mfu, r.total_seconds);
}

std::string log_line(EvaluationReport const& r) {
  return fmt::format(R"({{"kind":"eval","iter":{},"train_loss":{},"val_loss":{},"lr":{}}})", r.iteration,
                     number(r.train_loss), number(r.val_loss), number(r.learning_rate));
}

std::string log_line(Jump const& jump, std::string_view what) {
  return fmt::format(R"({{"kind":"jump","iter":{},"what":"{}","value":{},"median":{}}})", jump.iteration, what,
                     number(jump.value), number(jump.median));
}

std::string log_line_of_skipped_step(std::int64_t iteration) {
  return fmt::format(R"({{"kind":"skipped","iter":{}}})", iteration);
}

std::string log_line_of_save(std::int64_t iteration, std::string_view what) {
  return fmt::format(R"({{"kind":"save","iter":{},"what":"{}"}})", iteration, what);
}

std::string log_line_of_failed_save(std::int64_t iteration, std::string_view what, std::string_view why) {
  return dumped({{"kind", "save_failed"}, {"iter", iteration}, {"what", what}, {"why", why}});
}

std::string log_line_of_sample(std::int64_t iteration, std::string_view text) {
  return dumped({{"kind", "sample"}, {"iter", iteration}, {"text", text}});
}

std::string log_line_of_memory(std::int64_t iteration, std::vector<std::string> const& ranks) {
  return fmt::format(R"({{"kind":"memory","iter":{},"ranks":[{}]}})", iteration, fmt::join(ranks, ","));
}

std::string log_line_of_stop(std::int64_t iteration, std::string_view why) {
  return dumped({{"kind", "stop"}, {"iter", iteration}, {"why", why}, {"at", time_text()}});
}

std::string processor_name() {
  std::ifstream stream("/proc/cpuinfo");
  for (std::string text; std::getline(stream, text);)
    if (text.starts_with("model name"))
      if (auto const at = text.find(": "); at != std::string::npos) return text.substr(at + 2);
  return "unknown";
}

}  // namespace transformer
