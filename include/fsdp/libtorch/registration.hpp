// SPDX-License-Identifier: Apache-2.0
// Guard of a Sharder while a module is registered: a registration that throws leaves nothing behind.
#pragma once

#include <cstddef>
#include <type_traits>
#include <utility>

#include "fsdp/engine/attempt.hpp"
#include "fsdp/engine_options.hpp"
#include "fsdp/libtorch/module_buffers.hpp"
#include "fsdp/libtorch/passes.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE::libtorch::detail {

/// A module is being registered. If an exception ends its scope, the engine, the passes and the list of modules forget
/// it, and its parameters get their values back.
/// @tparam E  Engine
template <class E>
class [[nodiscard]] Registration {
 public:
  /// @param to  the unit that gets a further use, if that is there already
  Registration(E& engine, Passes& passes, NamedModules& modules, UnitId to = {})
      : passes_(&passes),
        modules_(&modules),
        units_(passes.units().size()),
        uses_(passes.use_count()),
        names_(modules.size()),
        declared_(engine.shards().core().declared, to) {}
  Registration(Registration&&) = delete;
  ~Registration() {
    if (!declared_.is_failing()) return;
    passes_->truncate(units_, uses_);
    while (modules_->size() > names_) modules_->pop_back();
  }

 private:
  using Declaration = std::remove_reference_t<decltype(std::declval<E&>().shards().core().declared)>;

  Passes* passes_;
  NamedModules* modules_;
  std::size_t units_, uses_, names_;  ///< that were there before
  fsdp::detail::Rollback<Declaration> declared_;
};

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE::libtorch::detail
