// SPDX-License-Identifier: Apache-2.0
// What may go wrong in a run, as data: the calls of each rank, the tricks among them, and how the run must end.
#pragma once

#include <cstddef>
#include <string>
#include <utility>
#include <vector>

#include "tests/support/trial/draw.hpp"
#include "tests/support/trial/model.hpp"

namespace fuzz {

using trial::Op;

/// What happens at a call.
enum class Trick : unsigned char {
  none,
  throws,        ///< the module throws on the calling thread; an export's reader, where no module runs
  throws_other,  ///< the same, but what it throws is no std::exception
  task,          ///< the module enqueues work that throws
  task_waits,    ///< the same, and it waits for the stream
  gather_task,   ///< the same on the stream that gathers, and it does not wait
  outside,       ///< the caller throws instead of calling
  returns,       ///< the rank's body returns instead of calling
  refused,       ///< the call itself must throw an fsdp::Error
  nested,        ///< the module makes another call, which must be refused
};

/// One call of a rank.
struct Call {
  Op op;
  Trick trick = Trick::none;
  bool caught = false;  ///< the rank goes on
  Op other{};           ///< of Trick::nested
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

/// Draws a scenario. The same seed draws the same.
Scenario draw_scenario(std::uint64_t seed);

/// The scenario for people: model, settings, each rank's calls.
std::string describe(Scenario const& scenario);

/// What a module throws.
inline std::string fault_text(int rank, std::string const& where) {
  return fmt::format("fault of rank {} in '{}'", rank, where);
}

}  // namespace fuzz
