// SPDX-License-Identifier: Apache-2.0
// Prints a program.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "fsdp/detail/base/format.hpp"
#include "fsdp/detail/step/program.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE {

namespace detail {

/// "own", or the letter of a shared slot: A, B, ..., Z, A1, ...
inline std::string slot_name(std::vector<Slot> const& slots, std::uint32_t slot, char first, char last) {
  if (slots[slot].unit != Slot::any_unit) return "own";
  unsigned in_turn = 0;
  for (std::uint32_t other = 0; other < slot; ++other) in_turn += slots[other].unit == Slot::any_unit ? 1u : 0u;
  auto const letters = static_cast<unsigned>(last - first + 1);
  auto text = std::string(1, static_cast<char>(first + static_cast<int>(in_turn % letters)));
  return in_turn < letters ? text : text + std::to_string(in_turn / letters);
}
/// "->A" for parameters, "->x" for gradients; "" for other buffers.
inline std::string slot_name(Program const& program, step::Cells cells) {
  auto const slot = step::Buffers::index(cells);
  if (cells.pool == step::Pool::gather) return "->" + slot_name(program.gather_slots, slot, 'A', 'Z');
  if (cells.pool == step::Pool::gradient_slot) return "->" + slot_name(program.gradient_slots, slot, 'x', 'z');
  return {};
}

inline std::string conditions_of(step::Operation const& operation) {
  auto const when = operation.when;
  constexpr std::array<std::string_view, 10> names{
      "sharded at first", "unsharded at first", "dropping",      "keeping", "no sync", "group sync", "sync",
      "nothing waits",    "sums wait",          "gradients wait"};
  std::string text;
  for (auto const group : flag_groups) {
    if ((unsigned{when} & group) == group) continue;
    text += text.empty() ? " if " : " and ";
    bool several = false;
    for (std::size_t bit = 0; bit < names.size(); ++bit) {
      if ((unsigned{when} & group & (1u << bit)) == 0) continue;
      text += formatted("{}{}", several ? " or " : "", names[bit]);
      several = true;
    }
  }
  if (operation.condition == step::Condition::always) return text;
  text += text.empty() ? " if " : " and ";
  return text + (operation.condition == step::Condition::sum_waits ? "its sum waits" : "nothing of it waits");
}

/// The text of one operation in a printed step; "" if the operation before it stands for it, or if it is an open or a
/// close that is not printed.
inline std::string text_of(Program const& program, step::Operation const& operation) {
  using step::Pool;
  using step::Primitive;
  auto const& cells = operation.all[0].cells;
  auto const of_unit = [&](std::string_view what) {
    return formatted("{} {}", what, program.units[operation.unit].name);
  };
  switch (operation.primitive) {
    case Primitive::open: {
      bool const is_printed = cells.pool == Pool::gradient_slot || cells.pool == Pool::gradient;
      return is_printed ? of_unit("open") + slot_name(program, cells) : std::string();
    }
    case Primitive::close:
      return cells.pool == Pool::gather ? of_unit("close") + slot_name(program, cells) : std::string();
    case Primitive::zero:
    case Primitive::zero_padding:
      return of_unit(name(operation.primitive)) + (operation.unless_begun ? " unless begun" : "");
    case Primitive::add: return of_unit("add");
    default: break;
  }
  if (operation.span.name == Primitive::count_) return {};
  auto text = of_unit(name(operation.span.name));
  for (auto const& access : operation.accesses())
    if (access.cells.pool == Pool::gather && access.mode == step::Mode::write) text += slot_name(program, access.cells);
  if (operation.bucket != Program::none) text += formatted(" bucket {}", operation.bucket);
  bool const sent = step::is_collective(operation.primitive) && cells.pool == Pool::wire;
  return sent ? text + formatted(" in {}", name(*program.wire)) : text;
}

}  // namespace detail

/// Prints a line for each turn: left, the operations before the module's computation; right, those after it, in the
/// order in which they are enqueued. Shared slots of parameters are A, B, C, shared slots of gradients x, y. The
/// declared order comes first, then each path under its name.
/// @param flags  only operations that run in such a micro-step; any_flags: all, with their conditions
inline std::string to_text(Program const& program, StepFlags flags = any_flags) {
  std::size_t width = 0;
  for (auto const& module : program.modules) width = std::max(width, module.size());
  std::string text;
  auto const add = [&](std::vector<step::Operation> const& operations) {
    std::string_view separator = " ";
    for (auto const& operation : operations) {
      if (flags != any_flags && !operation.runs(flags)) continue;
      auto const words = detail::text_of(program, operation);
      if (words.empty()) continue;
      text += formatted("{}{}", separator, words);
      if (flags == any_flags) text += detail::conditions_of(operation);
      separator = ", ";
    }
  };
  for (std::size_t path = 0; path < program.paths(); ++path) {
    if (path > 0) text += formatted("path '{}':\n", program.path_name(path));
    for (auto const kind : pass_kinds)
      for (auto const& turn : program.turns(kind, path)) {
        text += formatted("{:<10} {:<{}} |", turn.recomputes() ? "recompute" : name(kind), program.modules[turn.use],
                          width);
        add(turn.before);
        text += " |";
        add(turn.after);
        text += '\n';
      }
  }
  return text;
}

/// The name of cells in messages: "gather slot 1, own slice", "gradient shard of 'h.0'".
inline std::string to_text(Program const& program, step::Cells cells) {
  auto const what = name(cells.pool);
  if (cells.pool == step::Pool::kept_slice || step::Buffers::is_staged(cells.pool))
    return formatted("{} {}", what, cells.first);
  if (step::Buffers::has_slices(cells.pool))
    return formatted("{} {}{}", what, cells.first / 2,
                     cells.count > 1        ? ""
                     : cells.first % 2 == 0 ? ", own slice"
                                            : ", rest");
  auto const unit = cells.pool == step::Pool::gradient ? program.buffers.unit_of_gradient(cells.first) : cells.first;
  return formatted("{} of '{}'", what, program.units[unit].name);
}

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE
