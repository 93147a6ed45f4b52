// SPDX-License-Identifier: Apache-2.0
// Trials and settings as C++: what a failing seed prints.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <fstream>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "tests/support/trial/text.hpp"

namespace trial {

namespace {

std::string literal(float value) { return value > 3e38f ? "INFINITY" : fmt::format("{:#}f", value); }
std::string literal(std::string const& text) { return fmt::format("\"{}\"", text); }

std::string literal(TensorSpec const& tensor) {
  return fmt::format("{{{}, {{{}}}, {}, {}, {}}}", literal(tensor.name), fmt::join(tensor.shape, ", "), tensor.decay,
                     literal(tensor.deviation), tensor.frozen);
}

std::string literal(Model const& model) {
  std::string text = fmt::format("{{{}, {}, {}u,\n     {{", model.width, model.max_rows, model.salt);
  for (auto const& unit : model.units) text += literal(unit) + ", ";
  text += "},\n     {";
  for (auto const& part : model.parts) {
    text += fmt::format("{{{}, {}, {{", literal(part.prefix), part.unit);
    for (auto const& tensor : part.tensors) text += literal(tensor) + ", ";
    text += fmt::format("}}, {}, {}}},\n      ", part.sets_gradients, part.adopted);
  }
  text += "},\n     {";
  for (bool const frozen : model.frozen) text += fmt::format("{}, ", frozen);
  text += "},\n     {";
  for (auto const& path : model.paths) text += fmt::format("{{{}}}, ", fmt::join(path, ", "));
  return text + fmt::format("}}, {}}}", model.zeros);
}

}  // namespace

std::string literal(Op const& op) {
  constexpr std::array<std::string_view, 12> kinds{"gradient_sync", "replica_sync", "reshard", "forward",
                                                   "backward",      "evaluate",     "discard", "gradients",
                                                   "import",        "clip",         "step",    "activations"};
  constexpr std::array<std::string_view, 3> norms{"l2", "l1", "inf"};
  auto const norm = op.norm == fsdp::NormKind::l2 ? norms[0] : op.norm == fsdp::NormKind::l1 ? norms[1] : norms[2];
  auto text = fmt::format("{{Op::{}, {}, {}", kinds[op.kind], op.data, literal(op.value));
  if (op.from != 0 || op.to != Op::all || op.kind == Op::clip || op.path != 0)
    text += fmt::format(", {}, {}, fsdp::NormKind::{}", op.from, op.to == Op::all ? "Op::all" : std::to_string(op.to),
                        norm);
  return text + (op.path != 0 ? fmt::format(", {}}}", op.path) : "}");
}

std::string literal(Trial const& trial) {
  auto text =
      fmt::format("{{{},\n    {},\n    {{{}, {}, {}, {}, {}, {}, {}}},\n    {{", trial.ranks, literal(trial.model),
                  trial.optimizer.adamw, literal(trial.optimizer.momentum), literal(trial.optimizer.weight_decay),
                  trial.optimizer.second, trial.optimizer.group, trial.optimizer.muon, trial.optimizer.centred);
  for (auto const& op : trial.script) text += literal(op) + ",\n     ";
  return text + fmt::format("}}, {}}}", trial.narrow);
}

std::string literal(Setting const& setting) {
  constexpr std::array<std::string_view, 5> shardings{"full", "grad_op", "hybrid_full", "hybrid_grad_op", "none"};
  constexpr std::array<std::string_view, 3> differing{"as_engine", "replicated", "other_resharding"};
  auto const& o = setting.options;
  std::string units;
  for (auto const unit : setting.units)
    units += fmt::format("UnitSharding::{}, ", differing[static_cast<std::size_t>(unit)]);
  auto text = fmt::format(
      "{{.sharding = Sharding::{}, .group = {}, .units = {{{}}},\n     .options = {{.prefetch = {}, {}.max_ahead_bytes "
      "= {}, "
      ".keep_last = {}, .keep_root = {},\n                 .reshard_ranks = {}, .allow_keep_unsharded = {}, "
      ".allow_no_sync = {},\n                 .allow_no_replica_sync = {}, .allow_frozen_parameters = {}, "
      ".bucket_bytes = {}, "
      ".first_bucket_bytes = {}, .passes_ahead = {}{}, .trap_stale_pointers = {}}},\n     .ahead = {{",
      shardings[static_cast<std::size_t>(setting.sharding)], setting.group, units, o.prefetch,
      o.backward_prefetch ? fmt::format(".backward_prefetch = {}, ", *o.backward_prefetch) : "", o.max_ahead_bytes,
      o.keep_last, o.keep_root, o.reshard_ranks, o.allow_keep_unsharded, o.allow_no_sync, o.allow_no_replica_sync,
      o.allow_frozen_parameters, o.bucket_bytes, o.first_bucket_bytes, o.passes_ahead,
      o.reduce_dtype ? fmt::format(", .reduce_dtype = fsdp::DType{{{}}}", static_cast<int>(*o.reduce_dtype)) : "",
      o.trap_stale_pointers);
  for (auto const& list : setting.ahead)
    text += fmt::format("{{{}, {}, {{{}}}}}, ", list.backward, list.at, fmt::join(list.uses, ", "));
  text += "}, .segments = {";
  for (auto const& segment : setting.segments) text += fmt::format("{{{}, {}}}, ", segment.first, segment.last);
  text += fmt::format("}}, .offloads_moments = {}, .offloads_masters = {}, .offloads_gradients = {}",
                      setting.offloads_moments, setting.offloads_masters, setting.offloads_gradients);
  return text + fmt::format(", .inline_compute = {}, .keeps = {}, .traced = {}, .replicates_vectors = {}}}",
                            setting.inline_compute, setting.keeps, setting.traced, setting.replicates_vectors);
}

namespace {

/// The text of a header of the tests with those that it includes, once each; where sources are no longer there, the
/// line that includes it.
std::string pasted(std::string const& header, std::set<std::string>& done) {
  if (!done.insert(header).second) return {};
  std::ifstream file(std::string(FSDP_SOURCE) + "/" + header);
  if (!file) return "#include \"" + header + "\"\n";
  std::string text;
  for (std::string line; std::getline(file, line);) {
    constexpr std::string_view include = "#include \"tests/";
    if (line.starts_with(include)) {
      text += pasted(line.substr(10, line.size() - 11), done);
    } else if (!line.starts_with("#pragma once") && !line.starts_with("// SPDX")) {
      text += line + "\n";
    }
  }
  return text;
}

}  // namespace

std::string program(Trial const& trial, std::vector<Setting> const& settings) {
  std::set<std::string> done;
  std::string text = "// c++ -std=c++20 -O1 -pthread -DFMT_HEADER_ONLY -I <fsdp>/include this.cpp\n";
  for (auto const* const source : {"compare.hpp", "trainers.cpp"})
    text += pasted(std::string("tests/support/trial/") + source, done);
  text += "int main() {\n  using namespace trial;\n  Trial const tried\n   " + literal(trial) + ";\n";
  text += "  std::vector<Setting> const settings{\n";
  for (auto const& setting : settings) text += "    " + literal(setting) + ",\n";
  return text +
         "  };\n  auto const difference = compare(tried, settings);\n"
         "  fmt::print(\"{}\\n\", difference.empty() ? \"no difference\" : difference);\n"
         "  return difference.empty() ? 0 : 1;\n}\n";
}

}  // namespace trial
