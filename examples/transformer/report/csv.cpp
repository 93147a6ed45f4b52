// SPDX-License-Identifier: Apache-2.0
#include "transformer/report/csv.hpp"

#include <fmt/format.h>

#include <cmath>
#include <cstddef>
#include <string_view>

namespace transformer::report {
namespace {

/// In quotes if it has what a reader would split at.
std::string text_cell(std::string const& text) {
  if (text.find_first_of(",\"\r\n") == std::string::npos) return text;
  std::string quoted = "\"";
  for (char const letter : text) quoted += letter == '"' ? std::string("\"\"") : std::string(1, letter);
  return quoted + '"';
}

/// As few digits as give the number back.
std::string cell(double value) { return std::isfinite(value) ? fmt::format(",{}", value) : std::string(","); }

std::string row(std::string const& name, Iteration const& iteration, Evaluation const* evaluation) {
  auto const& i = iteration;
  auto text = fmt::format("{},{}", name, i.iteration);
  for (double const value : {i.tokens, i.seconds, i.loss, evaluation != nullptr ? evaluation->train_loss : unknown,
                             evaluation != nullptr ? evaluation->val_loss : unknown, i.learning_rate, i.gradient_norm,
                             i.milliseconds, i.tokens_per_second, i.mfu})
    text += cell(value);
  return text + "\n";
}

}  // namespace

std::string csv(std::vector<Run const*> const& runs) {
  std::string text =
      "run,iter,tokens,seconds,loss,eval_train_loss,eval_val_loss,lr,grad_norm,time_ms,tokens_per_s,mfu\n";
  for (auto const* run : runs) {
    auto const name = text_cell(run->name);
    auto evaluation = run->evaluations.begin();
    auto const alone = [&] {  // an evaluation of which no iteration was logged
      Iteration none;
      none.iteration = evaluation->iteration;
      none.tokens = evaluation->tokens;
      none.seconds = evaluation->seconds;
      text += row(name, none, &*evaluation++);
    };
    for (auto const& iteration : run->iterations) {
      while (evaluation != run->evaluations.end() && evaluation->iteration < iteration.iteration) alone();
      bool const both = evaluation != run->evaluations.end() && evaluation->iteration == iteration.iteration;
      text += row(name, iteration, both ? &*evaluation++ : nullptr);
    }
    while (evaluation != run->evaluations.end()) alone();
  }
  return text;
}

}  // namespace transformer::report
