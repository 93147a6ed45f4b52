// SPDX-License-Identifier: Apache-2.0
// Kernel launches of the stand-in.
#include <cxxabi.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "tests/standin/runtime/grid.hpp"
#include "tests/standin/runtime/kernels.hpp"
#include "tests/standin/runtime/state.hpp"

namespace standin {

namespace {

constexpr int plain_shared = 48 * 1024, most_shared = 227 * 1024;
constexpr std::size_t most_parameter_bytes = 32764;

constinit Kernel const* kernels = nullptr;  // a list; written before main() alone

std::string name_of(Kernel const& kernel) {
  int status = 0;
  char* const readable = abi::__cxa_demangle(kernel.type, nullptr, nullptr, &status);
  std::string name = status == 0 ? readable : kernel.type;
  std::free(readable);
  return name;
}

Kernel const* kernel_of(void const* function) {
  for (auto const* kernel = kernels; kernel != nullptr; kernel = kernel->next) {
    if (kernel->function == function) return kernel;
  }
  return nullptr;
}

std::size_t parameter_bytes(Kernel const& kernel) {
  std::size_t bytes = 0;
  for (auto const& parameter : kernel.parameters)
    bytes = (bytes + parameter.alignment - 1) / parameter.alignment * parameter.alignment + parameter.bytes;
  return bytes;
}

/// Whether the host has memory mapped there. Numbers below what pointers of the host look like are none.
bool is_host_memory(std::uintptr_t word) {
#if defined(__x86_64__)
  constexpr std::uintptr_t lowest = std::uintptr_t{0x5500} << 32, highest = std::uintptr_t{1} << 47;
#else
  constexpr std::uintptr_t lowest = std::uintptr_t{1} << 36, highest = std::uintptr_t{1} << 48;
#endif
  if (word < lowest || word >= highest) return false;
  auto const page = static_cast<std::uintptr_t>(::sysconf(_SC_PAGESIZE));
  unsigned char resident = 0;
  return mincore(reinterpret_cast<void*>(word / page * page), 1, &resident) == 0;
}

/// Notes the allocations that words of an argument point into; reports pointers that a kernel may not follow.
void inspect(Call& call, int device, void const* argument, Parameter const& parameter, std::string const& what,
             Allocations& uses) {
  std::vector<std::max_align_t> copy(parameter.bytes / sizeof(std::max_align_t) + 1);
  std::memcpy(copy.data(), argument, parameter.bytes);
  parameter.clear_padding(copy.data());
  for (std::size_t at = 0; at + sizeof(std::uintptr_t) <= parameter.bytes; at += sizeof(std::uintptr_t)) {
    std::uintptr_t word = 0;
    std::memcpy(&word, reinterpret_cast<std::byte const*>(copy.data()) + at, sizeof word);
    auto* const address = reinterpret_cast<void const*>(word);
    auto const place = place_of(call.runtime, address);
    if (place.kind == Place::Kind::allocated) {
      if (auto allocation = device_operand(call, device, address, 1, what); allocation != nullptr)
        uses.push_back(std::move(allocation));
    } else if (place.kind == Place::Kind::freed) {
      report(call, rule("freed_memory"), what + " points at " + hex(address) + ", which was freed");
    } else if (place.kind == Place::Kind::elsewhere && is_host_memory(word)) {
      report(call, rule("kernel_argument"), what + " points at " + hex(address) + ", pageable memory of the host");
    }
  }
}

/// Checks a launch's numbers. @return the error, after a report
cudaError_t check(Call& call, cudaLaunchConfig_t const& config, Kernel const& kernel, std::string const& name) {
  auto const& grid = config.gridDim;
  auto const complain = [&](std::string_view rule, std::string const& why, cudaError_t error) {
    report(call, rule, name + ": " + why);
    return error;
  };
  if (grid.x == 0 || grid.x > 0x7fffffffu || grid.y != 1 || grid.z != 1)
    return complain(rule("grid"),
                    "a grid of " + std::to_string(grid.x) + " x " + std::to_string(grid.y) + " x " +
                        std::to_string(grid.z) + " blocks",
                    cudaErrorInvalidConfiguration);
  auto const threads = std::uint64_t{config.blockDim.x} * config.blockDim.y * config.blockDim.z;
  if (threads == 0 || threads > static_cast<unsigned>(kernel.most_threads) || threads % 32 != 0 ||
      threads != config.blockDim.x)
    return complain(rule("threads"),
                    std::to_string(threads) + " threads a block, launch bounds " + std::to_string(kernel.most_threads),
                    cudaErrorInvalidConfiguration);
  auto const raised = call.runtime.shared_limits.find({config.stream->device, kernel.function});
  int const limit = raised == call.runtime.shared_limits.end() ? plain_shared : raised->second;
  if (config.dynamicSmemBytes > static_cast<std::size_t>(limit))
    return complain(rule("shared_memory"),
                    std::to_string(config.dynamicSmemBytes) + " bytes of shared memory, " + std::to_string(limit) +
                        " allowed on device " + std::to_string(config.stream->device),
                    cudaErrorInvalidValue);
  if (auto const bytes = parameter_bytes(kernel); bytes > most_parameter_bytes)
    return complain(rule("parameters"), std::to_string(bytes) + " bytes of parameters", cudaErrorInvalidValue);
  if (config.numAttrs != 0)
    return complain(rule("launch_attributes"), std::to_string(config.numAttrs) + " attributes", cudaErrorNotSupported);
  return cudaSuccess;
}

cudaError_t launch(Call& call, cudaLaunchConfig_t const& config, Kernel const& kernel, void** arguments) {
  auto const name = name_of(kernel);
  int const device = config.stream->device;
  if (device != current_device()) {
    report(
        call, rule("launch_device"),
        name + " on " + text_of(config.stream) + " while device " + std::to_string(current_device()) + " is current");
    return call.result(cudaErrorInvalidResourceHandle, device);
  }
  if (auto const error = check(call, config, kernel, name); error != cudaSuccess) return call.result(error, device);
  if (auto const status = call.result(cudaSuccess, device); status != cudaSuccess) return status;
  auto operation = std::make_unique<Operation>();
  operation->what = name;
  for (std::size_t i = 0; i < kernel.parameters.size(); ++i)
    inspect(call, device, arguments[i], kernel.parameters[i], name + ", argument " + std::to_string(i),
            operation->uses);
  operation->work = grid(*config.stream, static_cast<int>(config.blockDim.x), config.dynamicSmemBytes,
                         std::int64_t{config.gridDim.x}, kernel.bind(arguments), call.runtime.seed);
  push_locked(config.stream, std::move(operation));
  return cudaSuccess;
}

}  // namespace

Kernel::Kernel(void const* kernel, char const* type_name, int threads, std::span<Parameter const> passed, Bind copy)
    : function(kernel), type(type_name), most_threads(threads), parameters(passed), bind(copy), next(kernels) {
  kernels = this;
}

void refuse_call(Kernel const& kernel) {
  report(rule("unknown_kernel"), name_of(kernel) + " was called as a function");
  std::abort();
}

}  // namespace standin

using standin::Call;
using standin::rule;

extern "C" {

cudaError_t CUDARTAPI cudaLaunchKernelExC(cudaLaunchConfig_t const* config, void const* function, void** arguments) {
  Call call("cudaLaunchKernelExC");
  if (config == nullptr) return call.result(cudaErrorInvalidValue);
  if (!usable(call, config->stream, "a launch")) return call.result(cudaErrorInvalidResourceHandle);
  if (auto const* const kernel = standin::kernel_of(function))
    return standin::launch(call, *config, *kernel, arguments);
  report(call, rule("unknown_kernel"), standin::hex(function) + " is no kernel of this program");
  return call.result(cudaErrorInvalidDeviceFunction);
}

cudaError_t CUDARTAPI cudaFuncSetAttribute(void const* function, cudaFuncAttribute attribute, int value) {
  Call call("cudaFuncSetAttribute");
  auto const* const kernel = standin::kernel_of(function);
  if (kernel == nullptr) return call.result(cudaErrorInvalidDeviceFunction);
  if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize || value < 0) return call.result(cudaErrorInvalidValue);
  int const device = standin::current_device();
  if (value > standin::most_shared) {
    report(call, rule("shared_memory"), standin::name_of(*kernel) + " asks for " + std::to_string(value) + " bytes");
    return call.result(cudaErrorInvalidValue, device);
  }
  call.runtime.shared_limits[{device, function}] = value;
  return call.result(cudaSuccess, device);
}

}  // extern "C"
