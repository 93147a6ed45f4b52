// SPDX-License-Identifier: Apache-2.0
// One rank of llama; rank_host.cpp and rank_cuda.cu instantiate it.
#pragma once

#include <utility>

#include "llama/program.hpp"
#include "transformer/training/rank.hpp"

namespace transformer {

template <class P, fsdp::Communicator C>
int run_rank(C world, Job const& job) {
  return run_rank_of<llama::Program, P>(std::move(world), job);
}

}  // namespace transformer
