// SPDX-License-Identifier: Apache-2.0
#include "transformer/report/log_reader.hpp"

#include <algorithm>
#include <charconv>
#include <fstream>
#include <iterator>
#include <map>
#include <system_error>
#include <utility>

#include "fsdp/error.hpp"
#include "fsdp/json.hpp"
#include "transformer/report/json_members.hpp"
#include "transformer/report/log_file.hpp"
#include "transformer/report/memory_bars.hpp"

namespace transformer::report {
namespace {

/// A number that counts something; 0 where there is none, or one that is not whole.
std::int64_t count(Json const& object, char const* name) {
  double const value = number(object, name);
  return value >= 0 && value < 9e18 ? static_cast<std::int64_t>(value) : 0;
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

/// One run of a log, and where its last start began.
struct Reading {
  Run run;
  std::vector<std::string> ids;  ///< of its starts
  std::map<std::int64_t, Iteration> iterations;
  std::map<std::int64_t, Evaluation> evaluations;
  std::map<std::pair<std::int64_t, std::string>, JumpRow> jumps;
  std::map<std::int64_t, std::string> samples;
  // The last start: the iteration that it began with, what was trained on before that, and tokens of an iteration.
  std::int64_t first = 0;
  double tokens = 0, each = unknown;
  double seconds_before = 0;

  bool is_empty() const { return run.starts == 0 && iterations.empty(); }
  bool has_start(std::string const& id) const { return std::find(ids.begin(), ids.end(), id) != ids.end(); }

  /// @return whether it is a line of a log
  bool take(Json const& object, std::string const& kind) {
    double const number_of = number(object, "iter");
    if (!(number_of >= 0 && number_of < 1e15)) return false;
    auto const iteration = static_cast<std::int64_t>(number_of);
    if (kind == "iter") {
      iterations[iteration] = {iteration,
                               number(object, "loss"),
                               number(object, "lr"),
                               number(object, "time_ms"),
                               number(object, "tokens_per_s"),
                               number(object, "mfu"),
                               number(object, "grad_norm"),
                               tokens_before(iteration),
                               seconds_before + number(object, "total_time_s")};
    } else if (kind == "eval") {
      evaluations[iteration] = {iteration, number(object, "train_loss"), number(object, "val_loss"),
                                tokens_before(iteration), seconds_until(iteration)};
    } else if (kind == "jump") {
      auto const what = text(object, "what");
      jumps[{iteration, what}] = {iteration, what, number(object, "value"), number(object, "median")};
    } else if (kind == "sample") {
      samples[iteration] = text(object, "text");
    } else if (kind == "memory") {
      memory(object);
    } else if (kind == "stop") {
      run.stopped = text(object, "why");
    }
    return true;
  }

  void start(Json const& object) {
    ++run.starts;
    run.stopped.clear();
    auto const iteration = count(object, "iter");
    tokens = tokens_before(iteration);
    first = iteration;
    seconds_before = seconds_until(first);
    jumps.erase(jumps.lower_bound({first, ""}), jumps.end());  // of iterations that are done again
    run.header = header_of(object);
    ids.push_back(run.header.id);
    each = setting_number(run.header, "gradient_accumulation_steps") * setting_number(run.header, "batch_size") *
           setting_number(run.header, "block_size");
    if (!run.header.trace.empty())
      run.traces.insert(run.traces.begin(), {run.header.trace, run.header.id, run.header.ranks});
  }

  Run finished() {
    for (auto const& [iteration, row] : iterations) run.iterations.push_back(row);
    for (auto const& [iteration, row] : evaluations) run.evaluations.push_back(row);
    for (auto const& [key, row] : jumps) run.jumps.push_back(row);
    for (auto const& [iteration, text] : samples) run.samples.push_back({iteration, text});
    return std::move(run);
  }

 private:
  /// Tokens that this start and earlier ones trained on before an iteration. NaN: unknown.
  double tokens_before(std::int64_t iteration) const {
    return iteration == first ? tokens : tokens + static_cast<double>(iteration - first) * each;
  }
  /// How long training has taken until an iteration begins, by the last that was logged before it.
  double seconds_until(std::int64_t iteration) const {
    auto const next = iterations.lower_bound(iteration);
    return next == iterations.begin() ? 0 : std::prev(next)->second.seconds;
  }
  void memory(Json const& object) {
    auto const ranks = object.find("ranks");
    if (ranks == object.end() || !ranks->is_array()) return;
    run.memory.clear();
    for (auto const& rank : *ranks)
      if (rank.is_object()) run.memory.push_back({bytes_by_tag(rank), count(rank, "peak_state")});
    for (auto const& rank : run.memory) run.most_memory = std::max(run.most_memory, total_bytes(rank.reserved));
  }
};

/// The runs of a log, of which the last start says which one counts.
class Log {
 public:
  void line(std::string const& line) {
    if (line.empty()) return;
    auto const object = fsdp::checkpoint::parse_json<Json>(line);
    if (object.is_discarded() || !object.is_object()) {
      ++unread_;
    } else if (auto const kind = text(object, "kind"); kind == "run") {
      choose(object);
      now_.start(object);
    } else if (!now_.take(object, kind)) {
      ++unread_;
    }
  }
  Run finished() {
    auto run = now_.finished();
    run.earlier = std::ssize(others_);
    run.unread = unread_;
    return run;
  }

 private:
  /// A start from scratch begins a run. One that resumes goes on with the run whose start has saved the checkpoint: a
  /// run that began in between has saved none.
  void choose(Json const& start) {
    auto const resumed = start.find("resumed");
    if (resumed == start.end() || !resumed->is_boolean() || !resumed->get<bool>()) {
      if (!now_.is_empty()) others_.push_back(std::exchange(now_, {}));
      return;
    }
    auto const from = text(start, "from");
    if (from.empty() || now_.has_start(from)) return;
    auto const other =
        std::find_if(others_.rbegin(), others_.rend(), [&](auto const& run) { return run.has_start(from); });
    if (other != others_.rend()) std::swap(*other, now_);
  }

  Reading now_;
  std::vector<Reading> others_;
  std::int64_t unread_ = 0;  ///< lines
};

}  // namespace

std::string Header::setting(std::string_view name) const {
  for (auto const& [key, value] : settings)
    if (key == name) return value;
  return {};
}

Run read_log(std::istream& lines) {
  Log log;
  for (std::string text; std::getline(lines, text);) log.line(text);
  return log.finished();
}

Run read_run(std::filesystem::path const& folder) {
  auto const file = folder / log_file_name;
  std::error_code ignored;
  std::ifstream stream;
  if (std::filesystem::is_regular_file(file, ignored)) stream.open(file, std::ios::binary);
  if (!stream.is_open())
    fsdp::fail<fsdp::ConfigError>("'{}': expected the out_dir of a training run, but the folder has no file {}",
                                  folder.string(), log_file_name);
  auto run = read_log(stream);
  if (run.starts == 0 && run.iterations.empty() && run.evaluations.empty())
    fsdp::fail<fsdp::ConfigError>("'{}' is not the log of a training run: none of its lines has \"kind\": \"run\"",
                                  file.string());
  run.folder = folder;
  auto const whole = std::filesystem::weakly_canonical(folder, ignored);
  run.name = (ignored ? folder : whole).filename().string();
  return run;
}

}  // namespace transformer::report
