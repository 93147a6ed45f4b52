// SPDX-License-Identifier: Apache-2.0
// Included by fsdp/detail/cuda/launch.hpp when CUDA's runtime is the stand-in: kernels as functions of the host
// compiler.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <tuple>
#include <typeinfo>
#include <utility>

#include "fsdp/detail/cuda/block.hpp"
#include "tests/standin/runtime/kernels.hpp"
#include "tests/support/emulated_block.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE::cuda::detail {

template <class Kernel, class... Args>
void run_kernel(Args... args);

template <class T>
void clear_padding(void* copy) {
  __builtin_clear_padding(static_cast<T*>(copy));
}

/// The stand-in's record of a kernel, made before main() in every program that may launch it.
template <class Kernel, class... Args>
struct KernelForStandin {
  static constexpr std::array<standin::Parameter, sizeof...(Args)> parameters{
      standin::Parameter{sizeof(Args), alignof(Args), &clear_padding<Args>}...};

  /// One index of a launch, in every thread of an emulated block; the arguments are copied as CUDA copies them.
  static standin::Body bind(void* const* arguments) { return bind(arguments, std::index_sequence_for<Args...>{}); }
  template <std::size_t... I>
  static standin::Body bind([[maybe_unused]] void* const* arguments, std::index_sequence<I...>) {
    return [copies = std::tuple<Args...>(*static_cast<Args const*>(arguments[I])...)](std::int64_t index) {
      Kernel{}(ThreadBlock<emulated::Lanes>{}, index, std::get<I>(copies)...);
    };
  }
  static inline standin::Kernel const entry{reinterpret_cast<void const*>(&run_kernel<Kernel, Args...>),
                                            typeid(Kernel).name(), threads_per_block<Kernel>, parameters, &bind};
};

/// In the place of a __global__ function: its address is the kernel, and nobody calls it.
template <class Kernel, class... Args>
void run_kernel(Args...) {
  standin::refuse_call(KernelForStandin<Kernel, Args...>::entry);
}

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE::cuda::detail
