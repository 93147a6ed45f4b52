// SPDX-License-Identifier: Apache-2.0
// Selects tensors by their names.
#pragma once

#include <concepts>
#include <cstddef>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "fsdp/version.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE {

/// Whether `name` matches `pattern`, in which '*' stands for any number of characters, dots included, and '?' for one.
[[gnu::cold]] constexpr bool matches(std::string_view pattern, std::string_view name) {
  std::size_t p = 0, n = 0, star = pattern.size(), resume = 0;
  while (n < name.size()) {
    if (p < pattern.size() && pattern[p] == '*') {
      star = p++;
      resume = n;
    } else if (p < pattern.size() && (pattern[p] == '?' || pattern[p] == name[n])) {
      ++p, ++n;
    } else if (star < pattern.size()) {
      p = star + 1;
      n = ++resume;
    } else {
      return false;
    }
  }
  while (p < pattern.size() && pattern[p] == '*') ++p;
  return p == pattern.size();
}

/// Tensors of an engine, by rules on their full names. The last rule that matches a name decides.
class TensorSelection {
 public:
  static TensorSelection all() { return TensorSelection(true); }
  static TensorSelection none() { return TensorSelection(false); }

  /// Adds the tensors that match the pattern: see matches().
  [[gnu::cold]] TensorSelection& add(std::string_view pattern) { return rule('+', pattern); }
  /// Removes them.
  [[gnu::cold]] TensorSelection& remove(std::string_view pattern) { return rule('-', pattern); }
  /// A copy of the selection without the tensors that match a pattern.
  [[gnu::cold]] TensorSelection except(std::string_view pattern) const {
    return TensorSelection(*this).remove(pattern);
  }

  [[gnu::cold]] bool contains(std::string_view name) const {
    for (auto at = rules_.size(); at-- > 0;)
      if (matches(pattern(at), name)) return rules_[at][0] == '+';
    return all_;
  }
  /// Number of rules; `pattern(rule)` is the pattern of one.
  std::size_t size() const { return rules_.size(); }
  std::string_view pattern(std::size_t rule) const { return std::string_view(rules_[rule]).substr(1); }

  [[gnu::cold]] std::string text() const {
    std::string text = all_ ? "all" : "";
    for (auto const& rule : rules_) {
      if (!text.empty()) text += rule[0] == '+' ? ", and " : ", without ";
      text += '\'';
      text.append(rule, 1, std::string::npos);
      text += '\'';
    }
    return text;
  }

 private:
  explicit TensorSelection(bool all) : all_(all) {}
  [[gnu::cold]] TensorSelection& rule(char sign, std::string_view pattern) {
    rules_.emplace_back(1, sign) += pattern;
    return *this;
  }

  bool all_;
  std::vector<std::string> rules_;  ///< a sign, then the pattern
};

/// `fsdp::matching({"h.*", "embed.*"})`
template <std::size_t Count>
[[gnu::cold]] TensorSelection matching(char const* const (&patterns)[Count]) {
  auto selection = TensorSelection::none();
  for (auto const* pattern : patterns) selection.add(pattern);
  return selection;
}
/// The tensors whose names match one of the patterns: `fsdp::matching("h.*.weight")`.
template <std::convertible_to<std::string_view>... Patterns>
[[gnu::cold]] TensorSelection matching(std::string_view pattern, Patterns const&... more) {
  auto selection = TensorSelection::none();
  selection.add(pattern);
  (selection.add(more), ...);
  return selection;
}

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE
