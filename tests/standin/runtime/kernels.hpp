// SPDX-License-Identifier: Apache-2.0
// Registration of a program's kernels with the stand-in for the CUDA runtime.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>

namespace standin {

struct Parameter {
  std::size_t bytes, alignment;
  /// Zeros the bytes of a copy that are nobody's: what lies between members may look like a pointer.
  void (*clear_padding)(void* copy);
};

/// The function of every thread of a block. @param index  of the block
using Body = std::function<void(std::int64_t index)>;

/// A kernel of the program. Lives until the process ends, and is found by its function's address.
struct Kernel {
  using Bind = Body (*)(void* const* arguments);

  Kernel(void const* kernel, char const* type_name, int threads, std::span<Parameter const> passed, Bind copy);
  Kernel(Kernel const&) = delete;
  Kernel& operator=(Kernel const&) = delete;

  void const* function;
  char const* type;  ///< as the compiler spells it
  int most_threads;  ///< its launch bounds
  std::span<Parameter const> parameters;
  Bind bind;  ///< copies the arguments of a launch
  Kernel const* next;
};

/// Ends the process: only a launch may reach a kernel.
[[noreturn]] void refuse_call(Kernel const& kernel);

}  // namespace standin
