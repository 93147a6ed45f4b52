// SPDX-License-Identifier: Apache-2.0
// The lines that a run prints before its first step.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "transformer/launch/job.hpp"
#include "transformer/math/blas.hpp"
#include "transformer/training/prepared.hpp"

namespace transformer {

/// Facts for the introduction that need the model.
struct Introduction {
  struct Tensors {
    std::int64_t tensors = 0, elements = 0;
  };
  int ranks = 1;
  std::string_view strategy;
  BlasInfo blas;                ///< on the host
  std::string start;            ///< the line on the weights that training begins with, or empty
  std::int64_t vocab_size = 0;  ///< the model's
  std::int64_t parameters = 0;  ///< of the model, as its paper counts them
  std::int64_t elements = 0;    ///< of all tensors
  Tensors decayed, others;      ///< tensors that train
};

/// Prints what the run is.
void introduce(Introduction const& about, Job const& job, Prepared const& ready);

}  // namespace transformer
