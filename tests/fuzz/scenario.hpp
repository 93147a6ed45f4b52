// SPDX-License-Identifier: Apache-2.0
// Faults of a run, as data: the calls of each rank, the tricks among them, and how the run must end.
#pragma once

#include <fmt/format.h>

#include <array>
#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

#include "tests/support/trial/model.hpp"
#include "tests/support/trial/text.hpp"

namespace fuzz {

using trial::Op;

/// Kinds of faults at a call.
enum class Trick : unsigned char {
  none,
  throws,        ///< the module throws on the calling thread; an export's reader, where no module runs
  throws_other,  ///< the same, but what it throws is no std::exception
  task,          ///< the module enqueues work that throws
  task_waits,    ///< the same, and it waits for the stream
  gather_task,   ///< the same on the stream that gathers, and it does not wait
  task_behind,   ///< behind the call, compute is given work that throws
  outside,       ///< the caller throws instead of calling
  returns,       ///< the rank's body returns instead of calling
  refused,       ///< the call itself must throw an fsdp::Error
  nested,        ///< the module makes another call, which must be refused
  calls,         ///< the module makes another call
};

/// One call of a rank.
struct Call {
  Op op;
  Trick trick = Trick::none;
  bool caught = false;  ///< the rank goes on
  Op other{};           ///< of Trick::nested and Trick::calls
};

/// One rank's part.
struct Plan {
  trial::Trial trial;
  trial::Setting setting;
  std::vector<Call> calls;
  Trick before = Trick::none;  ///< instead of making the engine
  Trick end = Trick::none;     ///< in the last export
  int allocations = -1;        ///< the device gives so much memory, then none; negative: any
  int delay_us = 0;            ///< the caller and its kernels dawdle, up to so many microseconds a call
  /// After a failure the engine is thrown away, and another one makes these calls.
  std::vector<Call> afresh;
};

enum class Ending : unsigned char {
  errors,     ///< every rank ends with an error, but those that return early
  reference,  ///< every rank ends, with the reference's values
  either,     ///< one of the two
};

struct Scenario {
  std::string name;
  Ending ending = Ending::reference;
  std::vector<std::string> causes;  ///< every error says one of these; none given: it names a rank
  std::vector<Plan> ranks;
};

/// For people: the model, and each rank's setting and calls.
inline std::string describe(Scenario const& scenario) {
  auto text = fmt::format("{}\n{}\n", scenario.name, literal(scenario.ranks[0].trial));
  for (std::size_t rank = 0; rank < scenario.ranks.size(); ++rank) {
    auto const& plan = scenario.ranks[rank];
    text += fmt::format("rank {}: {}\n", rank, literal(plan.setting));
    constexpr std::array<std::string_view, 12> tricks{"",
                                                      "throws",
                                                      "throws 42",
                                                      "task throws",
                                                      "task throws, waits",
                                                      "gather throws",
                                                      "a task behind throws",
                                                      "the caller throws",
                                                      "returns",
                                                      "is refused",
                                                      "must not call",
                                                      "calls"};
    if (plan.before != Trick::none)
      text += fmt::format("  before: {}\n", tricks[static_cast<std::size_t>(plan.before)]);
    for (auto const& call : plan.calls)
      text += fmt::format("  {} {}{}{}\n", literal(call.op), tricks[static_cast<std::size_t>(call.trick)],
                          call.trick >= Trick::nested ? " " + literal(call.other) : "", call.caught ? ", caught" : "");
  }
  return text;
}

/// Text of a module's exception.
inline std::string fault_text(int rank, std::string const& where) {
  return fmt::format("fault of rank {} in '{}'", rank, where);
}

}  // namespace fuzz
