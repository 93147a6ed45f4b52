// SPDX-License-Identifier: Apache-2.0
#include "tests/standin/runtime/grid.hpp"

#include <utility>

#include "tests/standin/runtime/fiber_of_stream.hpp"

namespace standin {

Work grid([[maybe_unused]] CUstream_st& stream, int threads, std::size_t shared_bytes, std::int64_t blocks, Body body,
          std::uint64_t seed) {
  emulated::Options options;
  if (seed != 0) {
    options.schedule = emulated::Schedule::shuffled;
    options.seed = seed;
  }
#if STANDIN_TSAN
  options.stacks = &stream.fiber->stacks;  // streams share a thread, but no memory
#endif
  return [=, body = std::move(body)] {
    for (std::int64_t index = 0; index < blocks; ++index) {
      emulated::Machine block(threads, shared_bytes, options);
      block.run([&] { body(index); });
    }
    return true;
  };
}

}  // namespace standin
