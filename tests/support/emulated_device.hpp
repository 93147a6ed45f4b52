// SPDX-License-Identifier: Apache-2.0
// A device that runs kernels in emulated thread blocks.
#pragma once

#include <cstdint>
#include <string_view>

#include "fsdp/concepts.hpp"
#include "tests/support/emulated_block.hpp"
#include "tests/unit/kernels_support.hpp"

namespace emulated {

/// A device that runs kernels so, at once.
struct Device : kernel_test::LoopDevice {
  static constexpr std::string_view name = "emulated";
  static constexpr bool thread_blocks = true;
  Options options;

  template <class Kernel, class... Args>
  void launch(Stream&, std::int64_t blocks, Kernel, Args... args) const {
    emulated::launch<Kernel>(options, blocks, args...);
  }
};
static_assert(fsdp::Device<Device>);

}  // namespace emulated
