// SPDX-License-Identifier: Apache-2.0
// Functions of the caller (initial values, reduced gradients), and interfaces of parts that an engine has only if a
// program asks for them: state in host memory, paths.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "fsdp/detail/base/fixed_array.hpp"
#include "fsdp/detail/kernels/block.hpp"
#include "fsdp/detail/step/input.hpp"
#include "fsdp/detail/step/uses.hpp"
#include "fsdp/tensor.hpp"
#include "fsdp/version.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE {

struct TensorInfo;

namespace detail {

/// A function of Shards::set_initial_values.
class InitialValues {
 public:
  virtual ~InitialValues() = default;
  /// @param first  index of the tensor's element that goes to the first of `out`
  /// @param type   of the elements of `out`: values are rounded to nearest even
  virtual void fill(TensorInfo const& tensor, std::int64_t first, std::int64_t count, std::byte* out, DType type) = 0;
};

template <class F>
class InitialValuesOf final : public InitialValues {
 public:
  explicit InitialValuesOf(F f) : f_(std::move(f)) {}
  void fill(TensorInfo const& tensor, std::int64_t first, std::int64_t count, std::byte* out, DType type) override {
    FixedArray<float> values(static_cast<std::size_t>(count));
    f_(tensor, first, std::span<float>(values.begin(), values.size()));
    if (type == DType::f32) round<float>(values, out);
    if (type == DType::bf16) round<bf16>(values, out);
    if (type == DType::f16) round<fp16>(values, out);
  }

 private:
  template <class T>
  static void round(FixedArray<float> const& values, std::byte* out) {
    for (auto const value : values) {
      T const rounded = narrow<T>(value);
      std::memcpy(out, &rounded, sizeof rounded);
      out += sizeof rounded;
    }
  }

  F f_;
};

}  // namespace detail
}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE

namespace fsdp::inline FSDP_VERSION_NAMESPACE::detail {

/// A function of Shards::on_reduced. (std::function and std::unique_ptr would take longer to compile, and so would a
/// std::span here.)
class ReducedHook {
 public:
  virtual ~ReducedHook() = default;
  /// @param stream  points to a stream of the engine's device
  virtual void call(void* stream, float* gradients, std::int64_t elements) = 0;

  ReducedHook* next = nullptr;
};

/// @tparam Stream  of the engine's device
template <class Stream, class F>
class ReducedHookOf final : public ReducedHook {
 public:
  explicit ReducedHookOf(F f) : f_(std::move(f)) {}
  void call(void* stream, float* gradients, std::int64_t elements) override {
    f_(*static_cast<Stream*>(stream), std::span<float>(gradients, static_cast<std::size_t>(elements)));
  }

 private:
  F f_;
};

/// Functions of one unit, in the order of registration.
struct ReducedHooks {
  ReducedHook* first = nullptr;
  int size = 0;

  ReducedHooks() = default;
  ReducedHooks(ReducedHooks const&) = delete;
  ~ReducedHooks() {
    while (auto* const hook = first) {
      first = hook->next;
      delete hook;
    }
  }
  /// Takes ownership.
  [[gnu::cold]] void add(ReducedHook* hook) {
    auto** last = &first;
    while (*last != nullptr) last = &(*last)->next;
    *last = hook;
    ++size;
  }
  /// @param stream  points to a stream of the engine's device
  void call(void* stream, float* gradients, std::int64_t elements) const {
    for (auto* hook = first; hook != nullptr; hook = hook->next) hook->call(stream, gradients, elements);
  }
};

struct SlotMemory;

/// Moments of an optimizer in host memory: see [Note: Offloading]. The moments of a unit lie end to end.
struct HostMoments {
  std::byte* home(std::size_t unit) const { return host + starts[unit]; }
  std::int64_t bytes(std::size_t unit) const { return starts[unit + 1] - starts[unit]; }

  FixedArray<std::int64_t> starts;  ///< by unit: offset of its moments in bytes; one more for the end
  FixedArray<std::byte*> staged;    ///< by unit: address of its moments during its update
  std::byte* host = nullptr;
  bool steps = false;  ///< the optimizer takes the step under way
};

class OffloadHooks {
 public:
  OffloadHooks() = default;
  OffloadHooks(OffloadHooks&&) = delete;
  virtual ~OffloadHooks() = default;

  /// Takes memory, and tells units and slots where their state lies. @pre the engine is being sealed
  virtual void place(SlotMemory& memory) = 0;
  /// Gives the memory of place() back: sealing has failed.
  virtual void release() noexcept = 0;
  /// Called when master shards have been initialised.
  virtual void initialized() = 0;
  /// Takes zeroed memory for an optimizer's moments, until free_moments().
  /// @param starts      see HostMoments
  /// @param slot_bytes  of each of two staging slots in device memory, which begin at `slots`
  virtual HostMoments* make_moments(FixedArray<std::int64_t> starts, std::byte* slots, std::int64_t slot_bytes) = 0;
  virtual void free_moments(HostMoments* moments) = 0;
  virtual void begin_step() = 0;
  /// Called before and after a unit's masters are written on compute.
  /// @param updates  by an optimizer's step
  /// @param whole    false: an exception has ended that
  virtual void before_write(std::size_t unit, bool updates) = 0;
  virtual void end_write(std::size_t unit, bool updates, bool whole) = 0;
  /// Compute waits until a unit's masters are in host memory.
  virtual void order_read(std::size_t unit) = 0;
  /// Blocks the calling thread until all state is in host memory.
  virtual void await_stores() = 0;
};

/// Orders of uses besides the declared one. They count from 1: path 0 is the declared order.
class PathList {
 public:
  virtual ~PathList() = default;
  /// Number of paths, the declared order among them.
  virtual std::size_t size() const = 0;
  /// @throws UsageError if a path has a part of some segment of `declared`
  virtual void expect_segments(UseOrder const& declared) const = 0;
  /// Describes each path in a line: equal on all ranks.
  virtual std::string text(UseOrder const& declared) const = 0;
  /// Paths for the compiler. They gather ahead by depth.
  virtual FixedArray<StepPath> plan(UseOrder const& declared, int forward, int backward,
                                    FixedArray<bool> const& empty) const = 0;
  /// Gives paths the declared order's prefetch lists, as far as a path has these uses: at each use of `at`, the next
  /// use of each of `ahead`.
  virtual void set_prefetch(FixedArray<StepPath>& paths, bool in_forward, std::size_t at,
                            std::vector<std::size_t> const& ahead) const = 0;
  /// Records that the engine is sealed: paths keep their places.
  virtual void seal() = 0;
  /// The path's name in histories. @pre sealed
  virtual std::string_view label(std::size_t path) const = 0;
};

/// Adds a path to a declaration.
template <class Declaration>
struct PathAdder;  // fsdp/paths.hpp

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE::detail
