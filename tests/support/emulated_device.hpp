// SPDX-License-Identifier: Apache-2.0
// A device that runs kernels in emulated thread blocks.
#pragma once

#include <cstdint>
#include <mutex>
#include <set>
#include <string_view>
#include <typeindex>

#include "fsdp/concepts.hpp"
#include "tests/support/emulated_block.hpp"
#include "tests/unit/kernels_support.hpp"

namespace emulated {

/// Kernels that a device was asked to run, from any thread.
class Launched {
 public:
  void add(std::type_index kernel) {
    std::lock_guard const lock(mutex_);
    kernels_.insert(kernel);
  }
  /// @pre nobody launches any more
  std::set<std::type_index> const& kernels() const { return kernels_; }

 private:
  std::mutex mutex_;
  std::set<std::type_index> kernels_;
};

/// A device that runs kernels so, at once.
struct Device : kernel_test::LoopDevice {
  static constexpr std::string_view name = "emulated";
  static constexpr bool thread_blocks = true;
  Options options;
  Launched* launched = nullptr;  ///< gets every kernel

  template <class Kernel, class... Args>
  void launch(Stream&, std::int64_t blocks, Kernel, Args... args) const {
    if (launched != nullptr) launched->add(typeid(Kernel));
    emulated::launch<Kernel>(options, blocks, args...);
  }
};
static_assert(fsdp::Device<Device>);

}  // namespace emulated
