// SPDX-License-Identifier: Apache-2.0
// Counts scopes of Shards that read or write shards.
#pragma once

#include <string_view>

#include "fsdp/error.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE::detail {

/// Counts open scopes. While one is open, no use of a unit begins or ends: the gathers and reductions of that use would
/// not be ordered with the work that the scope enqueues.
class OpenAccesses {
 public:
  explicit OpenAccesses(int rank) : rank_(rank) {}

  /// Counts a reading scope while it lives.
  class Reading {
   public:
    explicit Reading(OpenAccesses& of) : of_(&of) { ++of.reads_; }
    Reading(Reading&&) = delete;
    ~Reading() { --of_->reads_; }

   private:
    OpenAccesses* of_;
  };
  /// Counts a writing scope while it lives.
  class Writing {
   public:
    /// @param alone  no other write may be open meanwhile: updates count, and offloaded state has one slot at a time
    /// @throws UsageError if another one is open, and one of the two must be alone
    Writing(OpenAccesses& of, std::string_view unit, bool alone) : of_(&of), alone_(alone) {
      FSDP_EXPECTS(of.writes_ == 0 || !(alone || of.alone_),
                   "rank {}: the shard of unit '{}' is to be written, but another write has not ended; end its scope "
                   "first",
                   of.rank_, unit);
      ++of.writes_;
      of.alone_ = alone;
    }
    Writing(Writing&&) = delete;
    ~Writing() {
      --of_->writes_;
      if (alone_) of_->alone_ = false;
    }

   private:
    OpenAccesses* of_;
    bool alone_;
  };

  /// @throws UsageError if a read or a write is open
  /// @param pass  name of the pass of the use. @param does  "begins" or "ends"
  void expect_none(std::string_view pass, std::string_view module, std::string_view does) const {
    FSDP_EXPECTS(writes_ == 0 && reads_ == 0,
                 "rank {}: {} of '{}' {}, but a scope of Shards::{} has not ended; end it first", rank_, pass, module,
                 does, writes_ > 0 ? "write or update" : "read_gradients");
  }

 private:
  int rank_;
  int reads_ = 0, writes_ = 0;
  bool alone_ = false;  ///< the write that is open must be alone
};

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE::detail
