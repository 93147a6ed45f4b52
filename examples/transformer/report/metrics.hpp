// SPDX-License-Identifier: Apache-2.0
// Metrics of a run (speed, utilisation, memory), and the lines that print them.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <string>
#include <string_view>

namespace transformer {

/// 491520 as "491,520".
std::string with_commas(std::int64_t value);

/// A loss or a norm with four decimals, "inf" or "nan".
std::string loss_text(double loss);

/// Model FLOP utilisation, smoothed. It is at most 1: a rate above the peak becomes the peak.
class MfuMeter {
 public:
  /// @param flop_per_iteration,peak  FLOP, and FLOP per second, of all ranks together
  MfuMeter(double flop_per_iteration, double peak) : flop_(flop_per_iteration), peak_(peak) {}

  /// Enters an iteration that was logged. The first five of a run are not counted.
  void add(std::int64_t local_iteration, double seconds) {
    if (local_iteration < 5) return;
    double const now = flop_ / seconds;
    set_peak(now);
    running_ = running_ < 0 ? now : 0.9 * running_ + 0.1 * now;
  }
  /// The utilisation of an iteration, at most 1.
  double of(double seconds) const { return std::min(1.0, flop_ / seconds / peak_); }
  /// Smoothed utilisation as a fraction; -1 until it is known.
  double value() const { return running_ < 0 ? -1.0 : running_ / peak_; }
  double peak() const { return peak_; }
  /// Later values are relative to this peak if it is the higher one.
  void set_peak(double peak) { peak_ = std::max(peak_, peak); }

 private:
  double flop_, peak_;
  double running_ = -1.0;  ///< FLOP per second; -1 until it is known
};

/// A logged iteration.
struct IterationReport {
  std::int64_t iteration = 0;
  double loss = 0;
  double seconds = 0;  ///< an iteration, without evaluation and checkpoint; the mean since a loss was last read
  double mfu = -1;     ///< fraction; -1: not known yet
  double learning_rate = 0;
  double total_seconds = 0;  ///< since training began
  double tokens_per_second = 0;
  std::int64_t memory_bytes = 0;
  double gradient_norm = -1;  ///< of all ranks' gradients before clipping; -1: not measured
};

/// A logged evaluation.
struct EvaluationReport {
  std::int64_t iteration = 0;
  double train_loss = 0, val_loss = 0;
  double learning_rate = 0;
  double mfu = -1;  ///< fraction; -1: not known yet
};

std::string line(IterationReport const& report);
std::string line(EvaluationReport const& report);
/// One JSON object each, numbers with 17 digits; a number that is not finite becomes null.
std::string json(IterationReport const& report);
std::string json(EvaluationReport const& report);

/// A file of JSON objects, one per line. Without a name it does nothing, and nothing fails.
class JsonLog {
 public:
  JsonLog() = default;
  /// @param setting  the setting that names the file, for messages
  /// @throws fsdp::ConfigError if the file cannot be written
  JsonLog(std::string_view setting, std::string const& file);
  JsonLog(JsonLog const&) = delete;
  JsonLog& operator=(JsonLog const&) = delete;
  ~JsonLog();

  /// For what training outlives: the first failure is said on stderr, and lines that cannot be written are missing.
  /// @return whether it was written
  bool write(std::string_view object) noexcept;
  /// For what a command is run for. @throws fsdp::ResourceError if it cannot be written
  void write_or_fail(std::string_view object);

 private:
  bool put(std::string_view object) noexcept;
  std::string failure() const;

  std::string setting_, name_;
  bool warned_ = false;
  std::FILE* file_ = nullptr;
};

/// Proportional set size of this process: shared pages count in parts. 0 where the system does not tell.
std::int64_t pss_bytes();

}  // namespace transformer
