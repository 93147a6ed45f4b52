// SPDX-License-Identifier: Apache-2.0
// Shares an error of one rank with all ranks, so that all of them end.
#pragma once

#include <exception>
#include <string>
#include <utility>

#include "fsdp/communicator.hpp"
#include "fsdp/error.hpp"

namespace transformer {

/// An error of one rank, thrown on every rank.
struct AgreedError : fsdp::Error {
  using Error::Error;
};

/// Runs `check` on this rank. If it throws on any rank, every rank throws AgreedError with the text of the lowest.
/// @note Collective: yes; blocks.
template <class C, class Check>
void agree(C& world, Check&& check) {
  std::string problem;
  try {
    std::forward<Check>(check)();
  } catch (std::exception const& error) {
    problem = error.what();
    if (problem.empty()) problem = "an exception without a message";
  }
  auto const text = fsdp::comm::ask_first_rank(world, problem, "problems", fsdp::comm::first_text);
  if (!text.empty()) throw AgreedError(text);
}

}  // namespace transformer
