// SPDX-License-Identifier: Apache-2.0
// Texts of the symbolic content of cells, for messages.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "fsdp/format.hpp"
#include "fsdp/step/backward_uses.hpp"
#include "fsdp/step/program.hpp"
#include "fsdp/step/symbol.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE::step {

class SymbolTexts {
 public:
  [[gnu::cold]] explicit SymbolTexts(Program const& program) : program_(&program), uses_(program) {}

  std::string text(Symbol const& content) const {
    std::string_view const age = content.used_up ? "used-up " : "";
    switch (content.kind) {
      case Symbol::Kind::nothing: return "nothing";
      case Symbol::Kind::zeroes: return "zeroes";
      case Symbol::Kind::parameters:
        return formatted("{}parameters of '{}' of step {}", age, program_->units[content.unit].name, content.step);
      case Symbol::Kind::gradients: break;
    }
    auto words = formatted("{}gradients of '{}'", age, program_->units[content.unit].name);
    words += content.terms.empty() ? " of no micro-step" : ": " + text(content.unit, content.terms);
    if (content.padded) words += ", padding not zeroed";
    if (content.hooked) words += ", hooked";
    return words;
  }

 protected:
  /// "micro-steps 1-2 over all ranks, micro-step 3 of this rank"
  std::string text(std::uint32_t unit, std::map<Term, Share> const& terms) const {
    std::map<Share, std::map<std::uint32_t, std::vector<std::uint32_t>>> alike;  // uses by micro-step
    for (auto const& [term, share] : terms) alike[share][term.micro_step].push_back(term.use);
    std::string words;
    for (auto const& [share, micro_steps] : alike) {
      for (auto next = micro_steps.begin(); next != micro_steps.end();) {
        auto const [first, uses] = *next;
        auto last = first;
        if (!words.empty()) words += ", ";
        if (uses.size() == uses_.count(first, unit)) {
          while (++next != micro_steps.end() && next->first == last + 1 && next->second.size() == uses.size()) ++last;
          words += first == last ? formatted("micro-step {}", first) : formatted("micro-steps {}-{}", first, last);
        } else {
          words += formatted("use {} of micro-step {}", listed(uses), first);
          ++next;
        }
        words += scope(unit, share.ranks);
        if (share.times > 1) words += formatted(" {} times", share.times);
      }
    }
    return words;
  }
  std::string_view scope(std::uint32_t unit, int ranks) const {
    auto const& planned = program_->units[unit];
    if (ranks == planned.world()) return " over all ranks";
    return ranks == 1 ? " of this rank" : " over the group";
  }

  Program const* program_;
  BackwardUses uses_;
};

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE::step
