// SPDX-License-Identifier: Apache-2.0
#include "transformer/report/memory_bars.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <vector>

#include "transformer/report/scale.hpp"
#include "transformer/report/svg.hpp"

namespace transformer::report {
namespace {

constexpr std::size_t most_ranks = 8;
constexpr double bar = 22, pitch = 30, left = 60, top = 6;

struct Row {
  std::string label;
  BytesByTag bytes;
  bool plan;
};

/// Bytes of the first tags; 0 if a log has impossible values.
std::int64_t sum_of(BytesByTag const& bytes, std::size_t tags) {
  double sum = 0;
  for (std::size_t tag = 0; tag < tags; ++tag) sum += static_cast<double>(bytes[tag]);
  return sum < 9e18 ? static_cast<std::int64_t>(sum) : 0;
}

std::vector<Row> rows_of(Run const& run) {
  std::vector<Row> rows;
  if (total_bytes(run.header.plan) > 0) rows.push_back({"plan", run.header.plan, true});
  for (std::size_t rank = 0; rank < std::min(run.memory.size(), most_ranks); ++rank)
    rows.push_back({fmt::format("rank {}", rank), run.memory[rank].reserved, false});
  return rows;
}

std::string bar_of(Row const& row, Scale const& x, double y) {
  std::string text = text_at(row.plan ? "lane strong" : "lane", left - 8, y + bar / 2 + 4, row.label, "end");
  double at = 0;
  for (std::size_t tag = 0; tag < row.bytes.size(); ++tag) {
    auto const bytes = static_cast<double>(row.bytes[tag]);
    if (bytes <= 0) continue;
    double const begin = x(at), end = x(at + bytes);
    at += bytes;
    auto const name = fsdp::memory_tag_names[tag];
    text += rect(fmt::format("m{}{}", tag, row.plan ? " plan" : ""), begin, y, std::max(end - begin - 1, 0.5), bar,
                 fmt::format("{}: {} {}", row.label, name, bytes_text(bytes)));
    if (text_width(name) + 10 < end - begin)
      text += text_at(fmt::format("inside n{}{}", tag, row.plan ? " plan" : ""), begin + 6, y + bar / 2 + 4, name);
  }
  text += text_at("value", x(at) + 6, y + bar / 2 + 4, bytes_text(at));
  return text;
}

}  // namespace

std::int64_t planned_bytes(BytesByTag const& bytes) {
  return sum_of(bytes, static_cast<std::size_t>(fsdp::MemoryTag::activations));
}

std::int64_t total_bytes(BytesByTag const& bytes) { return sum_of(bytes, bytes.size()); }

bool has_memory(Run const& run) { return !rows_of(run).empty(); }

std::string memory_svg(Run const& run, double width) {
  auto const rows = rows_of(run);
  Range range{0, 0, false};
  for (auto const& row : rows) range.add(static_cast<double>(total_bytes(row.bytes)));
  if (range.high <= 0) range.high = 1;
  double const right = width - 64, bottom = top + pitch * static_cast<double>(rows.size());
  Scale const x(range, left, right);
  std::string text;
  for (auto const& tick : ticks(range, false, width < 500 ? 3 : 6)) {
    text += line("grid", x(tick.value), top - 4, x(tick.value), bottom);
    text += text_at("tick", x(tick.value), bottom + 16, tick.value == 0 ? "0" : bytes_text(tick.value), "middle");
  }
  double y = top;
  for (auto const& row : rows) {
    text += bar_of(row, x, y);
    y += pitch;
  }
  return svg_element(width, bottom + 24, "Memory of each rank by kind, in bytes, beside the plan", "", text);
}

}  // namespace transformer::report
