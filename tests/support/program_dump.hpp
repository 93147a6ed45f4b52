// SPDX-License-Identifier: Apache-2.0
// All fields of a program as text. Types and primitives are numbers, so that new names leave the text as it is.
#pragma once

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <cstddef>
#include <cstdint>
#include <iterator>
#include <string>
#include <utility>
#include <vector>

#include "fsdp/detail/step/memory_plan.hpp"
#include "fsdp/detail/step/program.hpp"

namespace fsdp::testing {

/// Writes programs and memory plans into one text: a line for each operation, buffer, unit and turn.
class ProgramDump {
 public:
  std::string const& text() const { return text_; }

  void add(Program const& program) {
    for (auto const& unit : program.units) add(unit);
    line("modules {}", fmt::join(program.modules, " "));
    for (auto const* slots : {&program.gather_slots, &program.kept_slots, &program.gradient_slots, &program.wires}) {
      line("slots {}", slots->size());
      for (auto const& slot : *slots) line("  {} {} {}", slot.bytes, slot.unit, slot.zeroed);
    }
    line("wire {} {} kept {} scratch {} staged {} {} accumulator {}", program.bucket_wire,
         program.wire ? static_cast<int>(*program.wire) : -1, program.kept_ranks, program.scratch_bytes,
         program.staged_masters, program.staged_gradients, program.accumulator_elements);
    line("order {}", fmt::join(program.gradient_order, " "));
    for (auto const& bucket : program.buckets) line("bucket {} {}", bucket.begin, bucket.end);
    add(program.buffers);
    for (std::uint32_t u = 0; u < program.units.size(); ++u)
      if (program.units[u].trains()) add(program.buffers.of_unit(step::Pool::gradient, u));
    for (auto const& bucket : program.buckets) add(program.buffers.bucket(bucket));
    line("noted {} events {}", fmt::join(program.awaitable, " "), fmt::join(program.events, " "));
    for (std::size_t path = 0; path < program.paths(); ++path) {
      line("path '{}'", program.path_name(path));
      for (auto const kind : pass_kinds) {
        line("pass {}", static_cast<int>(kind));
        for (auto const& turn : program.turns(kind, path)) {
          line("turn {} {} {}", turn.use, turn.unit, turn.index_in_path);
          add("before", turn.before);
          add(turn.compute);
          add("beside", turn.beside);
          add("after", turn.after);
        }
      }
    }
    add("norms", program.norms);
    add("updates", program.updates);
    add("fetches", program.fetches);
    add("gradient fetches", program.gradient_fetches);
    add("stores", program.stores);
    add("reads", program.reads);
    add("absent", program.absent);
  }
  void add(MemoryPlan const& plan) {
    line("memory {} {} {} {} {} {} {} {} {} {}", plan.parameters, plan.gradients, plan.optimizer, plan.host,
         plan.gather, plan.reduce, plan.live_forward, plan.live_backward, plan.live_accumulated, plan.live_most);
  }
  void add(std::string const& words) { line("{}", words); }

 private:
  template <class... Values>
  void line(fmt::format_string<Values...> format, Values&&... values) {
    fmt::format_to(std::back_inserter(text_), format, std::forward<Values>(values)...);
    text_ += '\n';
  }
  void add(step::Unit const& unit) {
    line("unit '{}' {} types {} {} {} first {} declared {:d}{:d}{:d}{:d}{:d}{:d}{:d}{:d}", unit.name, unit.elements,
         static_cast<int>(unit.types.parameter), static_cast<int>(unit.types.gradient),
         static_cast<int>(unit.gathered_type()), unit.first, unit.sharded, unit.reshards_after_forward,
         unit.sets_gradients, unit.padded, unit.frozen, unit.skips_gradients, unit.hooked, unit.offloads_masters);
    line("  ranks {} {} planned {:d}{:d}{:d}{:d}{:d} slots {} {} {} {}", unit.shard_ranks, unit.replicas,
         unit.in_backward, unit.reads_masters, unit.writes_shards, unit.waits_for_replicas, unit.accumulates,
         unit.gather_slot, unit.kept_slot, unit.gradient_slot, unit.staging_slot);
  }
  void add(step::Cells const& cells) { line("cells {} {} {}", static_cast<int>(cells.pool), cells.first, cells.count); }
  void add(step::Buffers const& buffers) {
    for (std::size_t pool = 0; pool < step::pools; ++pool)
      line("cells {}", buffers.size(static_cast<step::Pool>(pool)));
    for (std::size_t cell = 0; cell < buffers.size(step::Pool::gradient); ++cell)
      line("  {}", buffers.unit_of_gradient(static_cast<std::uint32_t>(cell)));
  }
  void add(char const* what, std::vector<step::Operation> const& operations) {
    line("{} {}", what, operations.size());
    for (auto const& operation : operations) add(operation);
  }
  void add(step::Operation const& of) {
    line("  {} {} {} {:d}{:d}{:d}{:d} {} {:x} {:x} {} {} {} {} {} span {} {:d} {}", static_cast<int>(of.primitive),
         static_cast<int>(of.stream), static_cast<int>(of.group), of.mean, of.beside, of.unless_begun, of.if_begun,
         static_cast<int>(of.condition), unsigned{of.when}, unsigned{of.records}, of.ranks, of.unit, of.bucket,
         of.elements, of.bytes, static_cast<int>(of.span.name), of.span.ends, of.span.bytes);
    for (std::size_t i = 0; i < of.size; ++i) {
      auto const& access = of.all[i];
      line("    {} {} {} {} {:x}", static_cast<int>(access.cells.pool), access.cells.first, access.cells.count,
           static_cast<int>(access.mode), unsigned{of.conflicts[i]});
    }
  }

  std::string text_;
};

}  // namespace fsdp::testing
