// SPDX-License-Identifier: Apache-2.0
// Checks of a trace file, for any kind of ranks.
#pragma once

#include <cstdint>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "fsdp/fsdp.hpp"
#include "fsdp/trace.hpp"
#include "tests/support/toy_model.hpp"

namespace toy {

/// Two traced steps. @return the file's text on rank 0, else nothing
template <class Comm>
std::string traced_run(Comm comm) {
  fsdp::Mesh<Comm> mesh(std::move(comm));
  auto engine = fsdp::Engine(mesh, fsdp::FullShard{});
  Network network(engine, {});
  fsdp::AdamW adamw(engine);
  engine.start_trace(1000);
  for (int step = 0; step < 2; ++step) {
    network.step(step);
    auto const norm = fsdp::clip_grad_norm(engine, 1.0f);
    adamw.step(norm);
  }
  auto const ranks = fsdp::gather_trace(mesh.world(), engine.stop_trace());
  return ranks.empty() ? std::string() : fsdp::chrome_trace(ranks);
}

/// @return what is wrong with the trace; empty if nothing
inline std::string faults(std::string const& text, int ranks) {
  auto const json = nlohmann::json::parse(text, nullptr, false);
  if (json.is_discarded()) return "it is no JSON";
  std::string wrong;
  struct Span {
    double begin, end;
    bool operator<(Span const& other) const { return begin < other.begin; }
  };
  std::map<std::pair<int, int>, std::vector<Span>> streams;  // by rank and stream
  std::set<int> named;
  std::set<std::pair<int, int>> named_streams;
  std::map<std::string, int> of_rank_0;
  std::vector<double> first(static_cast<std::size_t>(ranks), 1e30), last(first.size(), -1.0);
  for (auto const& event : json.at("traceEvents")) {
    auto const rank = event.at("pid").get<int>();
    if (rank < 0 || rank >= ranks) return "rank " + std::to_string(rank);
    if (event.at("ph") == "M") {
      if (event.at("name") == "process_name") named.insert(rank);
      if (event.at("name") == "thread_name") named_streams.emplace(rank, event.at("tid").get<int>());
      continue;
    }
    if (event.at("ph") != "X") wrong += "phase " + event.at("ph").dump() + "; ";
    auto const begin = event.at("ts").get<double>(), duration = event.at("dur").get<double>();
    if (begin < 0.0 || duration < 0.0) wrong += "a negative time in " + event.dump() + "; ";
    if (event.at("name").get<std::string>().empty()) wrong += "no name; ";
    auto const& args = event.at("args");
    if (!args.at("unit").is_string() || !args.at("pass").is_string() || args.at("step").get<int>() > 1)
      wrong += "args; ";
    bool const moves = event.at("cat") == "communication";
    if (moves != (args.at("bytes").get<std::int64_t>() > 0) && args.at("pass") != "optimizer") wrong += "bytes; ";
    streams[{rank, event.at("tid").get<int>()}].push_back({begin, begin + duration});
    if (rank == 0) ++of_rank_0[event.at("name").get<std::string>()];
    auto& rank_first = first[static_cast<std::size_t>(rank)];
    auto& rank_last = last[static_cast<std::size_t>(rank)];
    rank_first = std::min(rank_first, begin);
    rank_last = std::max(rank_last, begin + duration);
  }
  for (int rank = 0; rank < ranks; ++rank) {
    if (named.count(rank) == 0) wrong += "rank " + std::to_string(rank) + " has no name; ";
    // All ranks meet in every collective: on one clock, their times overlap.
    if (last[static_cast<std::size_t>(rank)] <= first[0] || first[static_cast<std::size_t>(rank)] >= last[0])
      wrong += "rank " + std::to_string(rank) + " has another clock; ";
  }
  for (auto& [stream, spans] : streams) {
    if (named_streams.count(stream) == 0) wrong += "a stream has no name; ";
    std::sort(spans.begin(), spans.end());
    for (std::size_t i = 1; i < spans.size(); ++i)
      if (spans[i].begin < spans[i - 1].end - 1e-3) wrong += "spans of one stream overlap; ";  // three decimals
  }
  if (of_rank_0["forward layers.2"] != 2 || of_rank_0["backward root"] != 4 || of_rank_0["optimizer layers.0"] != 2)
    wrong += "compute is missing; ";
  if (ranks > 1 && (of_rank_0["reduce-scatter root"] != 2 || of_rank_0["all-gather layers.2"] != 4))
    wrong += "collectives are missing; ";
  return wrong;
}

}  // namespace toy
