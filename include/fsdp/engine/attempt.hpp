// SPDX-License-Identifier: Apache-2.0
// Guards of a declaration while it calls functions of the caller: a call that throws leaves nothing behind.
#pragma once

#include <cstddef>
#include <exception>
#include <string_view>
#include <vector>

#include "fsdp/engine_options.hpp"
#include "fsdp/error.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE::detail {

/// While it lives, calls that declare something, or seal, throw a UsageError.
/// @tparam D  Declaration
template <class D>
class [[nodiscard]] Busy {
 public:
  /// @param with    what is under way, a literal
  /// @param action  this call, for the message
  /// @throws UsageError if something else is under way
  [[gnu::cold]] Busy(D& declared, std::string_view with, std::string_view action) : declared_(&declared) {
    declared.expect_idle(action);
    declared.set_busy(with);
  }
  Busy(Busy&&) = delete;
  ~Busy() { declared_->set_busy({}); }

 private:
  D* declared_;
};

/// Guards the registration of modules. If an exception ends the scope, they are forgotten.
template <class D>
class [[nodiscard]] Rollback {
 public:
  /// @param to  the unit that the modules are added to, if that is there already
  [[gnu::cold]] Rollback(D& declared, UnitId to) : declared_(&declared), before_(declared.mark(to)) {}
  Rollback(Rollback&&) = delete;
  [[gnu::cold]] ~Rollback() {
    if (is_failing()) declared_->restore(before_);
  }
  /// In a destructor: an exception ends the scope.
  bool is_failing() const { return std::uncaught_exceptions() > exceptions_; }

 private:
  D* declared_;
  std::vector<std::size_t> before_;
  int exceptions_ = std::uncaught_exceptions();
};

/// A Rollback for one call of the engine, which refuses other declarations until the call ends.
template <class D>
class [[nodiscard]] Attempt {
 public:
  /// @param module  for messages
  /// @param to      as in Rollback
  /// @throws UsageError if something else is under way
  [[gnu::cold]] Attempt(D& declared, std::string_view module, UnitId to = {})
      : busy_(declared, "a module is being added", formatted("module '{}' was added", module)),
        rollback_(declared, to) {}
  Attempt(Attempt&&) = delete;

 private:
  Busy<D> busy_;
  Rollback<D> rollback_;
};

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE::detail
