// SPDX-License-Identifier: Apache-2.0
#include "report/log_reader.hpp"

#include <algorithm>
#include <charconv>
#include <fstream>
#include <iterator>
#include <map>
#include <nlohmann/json.hpp>
#include <system_error>

#include "fsdp/error.hpp"
#include "report/memory_bars.hpp"
#include "run_log.hpp"

namespace nanogpt::report {
namespace {

using Json = nlohmann::ordered_json;

double number(Json const& object, char const* name) {
  auto const found = object.find(name);
  return found != object.end() && found->is_number() ? found->get<double>() : unknown;
}

/// A number that counts something; 0 where there is none, or one that is not whole.
std::int64_t count(Json const& object, char const* name) {
  double const value = number(object, name);
  return value >= 0 && value < 9e18 ? static_cast<std::int64_t>(value) : 0;
}

std::string text(Json const& object, char const* name) {
  auto const found = object.find(name);
  return found != object.end() && found->is_string() ? found->get<std::string>() : std::string();
}

Header::Texts texts(Json const& object, char const* name) {
  Header::Texts pairs;
  auto const found = object.find(name);
  if (found == object.end() || !found->is_object()) return pairs;
  for (auto const& [key, value] : found->items())
    pairs.emplace_back(key, value.is_string() ? value.get<std::string>() : value.dump());
  return pairs;
}

BytesByTag bytes_by_tag(Json const& object) {
  BytesByTag bytes{};
  for (std::size_t tag = 0; tag < bytes.size(); ++tag)
    bytes[tag] = count(object, std::string(fsdp::memory_tag_names[tag]).c_str());
  return bytes;
}

Header header_of(Json const& object) {
  Header header;
  header.id = text(object, "id");
  header.started = text(object, "started");
  header.settings = texts(object, "settings");
  header.environment = texts(object, "environment");
  header.ranks = count(object, "ranks");
  header.program = text(object, "program");
  header.trace = text(object, "trace");
  if (auto const model = object.find("model"); model != object.end() && model->is_object())
    header.parameters = count(*model, "parameters");
  if (auto const plan = object.find("plan"); plan != object.end() && plan->is_object())
    header.plan = bytes_by_tag(*plan);
  if (auto const given = object.find("given"); given != object.end() && given->is_array())
    for (auto const& name : *given)
      if (name.is_string()) header.given.push_back(name.get<std::string>());
  return header;
}

/// A setting that is a positive number; NaN if the header does not have it.
double setting_number(Header const& header, std::string_view name) {
  auto const text = header.setting(name);
  std::int64_t value{};
  auto const [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  bool const whole = error == std::errc{} && end == text.data() + text.size();
  return whole && value > 0 ? static_cast<double>(value) : unknown;
}

/// A log line by line.
class Reading {
 public:
  void line(std::string const& text) {
    if (text.empty()) return;
    auto const object = Json::parse(text, nullptr, false);
    if (object.is_discarded() || !object.is_object() || !take(object)) ++run_.unread;
  }
  Run finished() {
    for (auto const& [iteration, row] : iterations_) run_.iterations.push_back(row);
    for (auto const& [iteration, row] : evaluations_) run_.evaluations.push_back(row);
    for (auto const& [key, row] : jumps_) run_.jumps.push_back(row);
    for (auto const& [iteration, text] : samples_) run_.samples.push_back({iteration, text});
    return std::move(run_);
  }

 private:
  /// @return whether it is a line of a log
  bool take(Json const& object) {
    auto const kind = report::text(object, "kind");
    if (kind == "run") return start(object), true;
    double const number_of = number(object, "iter");
    if (!(number_of >= 0 && number_of < 1e15)) return false;
    auto const iteration = static_cast<std::int64_t>(number_of);
    if (kind == "iter") {
      iterations_[iteration] = {iteration,
                                number(object, "loss"),
                                number(object, "lr"),
                                number(object, "time_ms"),
                                number(object, "tokens_per_s"),
                                number(object, "mfu"),
                                number(object, "grad_norm"),
                                tokens_before(iteration),
                                seconds_before_ + number(object, "total_time_s")};
    } else if (kind == "eval") {
      evaluations_[iteration] = {iteration, number(object, "train_loss"), number(object, "val_loss"),
                                 tokens_before(iteration), seconds_until(iteration)};
    } else if (kind == "jump") {
      auto const what = report::text(object, "what");
      jumps_[{iteration, what}] = {iteration, what, number(object, "value"), number(object, "median")};
    } else if (kind == "sample") {
      samples_[iteration] = report::text(object, "text");
    } else if (kind == "memory") {
      memory(object);
    } else if (kind == "stop") {
      run_.stopped = report::text(object, "why");
    }
    return true;
  }
  void start(Json const& object) {
    auto const resumed = object.find("resumed");
    bool const goes_on = resumed != object.end() && resumed->is_boolean() && resumed->get<bool>();
    if (!goes_on) {
      Run fresh;
      fresh.earlier = run_.earlier + (run_.starts > 0 || !iterations_.empty() ? 1 : 0);
      fresh.unread = run_.unread;
      run_ = std::move(fresh);
      iterations_.clear();
      evaluations_.clear();
      jumps_.clear();
      samples_.clear();
      first_ = 0;
      tokens_ = 0;
    }
    ++run_.starts;
    run_.stopped.clear();
    auto const first = count(object, "iter");
    tokens_ = tokens_before(first);
    first_ = first;
    seconds_before_ = seconds_until(first);
    jumps_.erase(jumps_.lower_bound({first, ""}), jumps_.end());  // of iterations that are done again
    run_.header = header_of(object);
    each_ = setting_number(run_.header, "gradient_accumulation_steps") * setting_number(run_.header, "batch_size") *
            setting_number(run_.header, "block_size");
    if (!run_.header.trace.empty())
      run_.traces.insert(run_.traces.begin(), {run_.header.trace, run_.header.id, run_.header.ranks});
  }
  /// What this start and those before it have trained on before an iteration. NaN: not said.
  double tokens_before(std::int64_t iteration) const {
    return iteration == first_ ? tokens_ : tokens_ + static_cast<double>(iteration - first_) * each_;
  }
  /// How long training has taken until an iteration begins, by the last that was logged before it.
  double seconds_until(std::int64_t iteration) const {
    auto const next = iterations_.lower_bound(iteration);
    return next == iterations_.begin() ? 0 : std::prev(next)->second.seconds;
  }
  void memory(Json const& object) {
    auto const ranks = object.find("ranks");
    if (ranks == object.end() || !ranks->is_array()) return;
    run_.memory.clear();
    for (auto const& rank : *ranks)
      if (rank.is_object()) run_.memory.push_back({bytes_by_tag(rank), count(rank, "peak_state")});
    for (auto const& rank : run_.memory) run_.most_memory = std::max(run_.most_memory, total_bytes(rank.reserved));
  }

  Run run_;
  std::map<std::int64_t, Iteration> iterations_;
  std::map<std::int64_t, Evaluation> evaluations_;
  std::map<std::pair<std::int64_t, std::string>, JumpRow> jumps_;
  std::map<std::int64_t, std::string> samples_;
  // The last start: the iteration that it began with, what was trained on before that, and tokens of an iteration.
  std::int64_t first_ = 0;
  double tokens_ = 0, each_ = unknown;
  double seconds_before_ = 0;
};

}  // namespace

std::string Header::setting(std::string_view name) const {
  for (auto const& [key, value] : settings)
    if (key == name) return value;
  return {};
}

Run read_log(std::istream& lines) {
  Reading reading;
  for (std::string text; std::getline(lines, text);) reading.line(text);
  return reading.finished();
}

Run read_run(std::filesystem::path const& folder) {
  auto const file = folder / run_log_name;
  std::ifstream stream(file, std::ios::binary);
  if (!stream)
    fsdp::fail<fsdp::ConfigError>("'{}': expected the out_dir of a training run, but the folder has no file {}",
                                  folder.string(), run_log_name);
  auto run = read_log(stream);
  if (run.starts == 0 && run.iterations.empty() && run.evaluations.empty())
    fsdp::fail<fsdp::ConfigError>("'{}' is not the log of a training run: none of its lines has \"kind\": \"run\"",
                                  file.string());
  run.folder = folder;
  std::error_code ignored;
  auto const whole = std::filesystem::weakly_canonical(folder, ignored);
  run.name = (ignored ? folder : whole).filename().string();
  return run;
}

}  // namespace nanogpt::report
