// SPDX-License-Identifier: Apache-2.0
// Selects tensors by their names, and gives some of them settings that replace an optimizer's own.
#pragma once

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "fsdp/detail/base/fixed_array.hpp"
#include "fsdp/detail/kernels/math.hpp"
#include "fsdp/error.hpp"
#include "fsdp/layout.hpp"
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

/// Settings of the tensors that match a pattern. Unset members are the optimizer's. If a tensor matches several groups,
/// each sets what it has, and later groups override earlier ones.
struct ParamGroup {
  std::string tensors;                    ///< pattern of full names: see matches()
  std::optional<float> lr_scale{};        ///< times the learning rate of each step; 0: the tensors stay as they are
  std::optional<float> weight_decay{};    ///< of all these tensors, whatever their TensorOptions::decay
  std::optional<float> beta1{}, beta2{};  ///< AdamW
  std::optional<float> momentum{};        ///< Sgd and Muon
};

/// A list of groups: `{{.tensors = "head.*", .lr_scale = 10.0f}}`, or a std::vector<ParamGroup>.
class ParamGroups {
 public:
  ParamGroups() = default;
  ParamGroups(std::initializer_list<ParamGroup> list) : ParamGroups(list.begin(), list.size()) {}
  template <class List>
  requires requires(List const& list) { static_cast<ParamGroup const*>(list.data()); }
  ParamGroups(List const& list) : ParamGroups(list.data(), list.size()) {}

  ParamGroup const* begin() const { return groups_.begin(); }
  ParamGroup const* end() const { return groups_.end(); }

 private:
  [[gnu::cold]] ParamGroups(ParamGroup const* list, std::size_t size) : groups_(size) {
    std::copy(list, list + size, groups_.begin());
  }
  detail::FixedArray<ParamGroup> groups_;
};

namespace detail {

/// Settings of a tensor: those of the optimizer and of its groups.
struct TensorSettings {
  float weight_decay = 0.0f;
  float lr_scale = 1.0f;
  float first = 0.0f, second = 0.0f;  ///< beta1 and beta2; or momentum

  /// Whether one launch of a kernel can update both tensors. Weight decay is a matter of each chunk.
  bool same_launch(TensorSettings const& other) const {
    return lr_scale == other.lr_scale && first == other.first && second == other.second;
  }
};

/// A unit of an engine, as optimizers see it.
struct OwnedUnit {
  FlatLayout const* layout = nullptr;
  Range shard{};
  bool frozen = false;
};

/// The tensors that an optimizer owns, and the settings of each.
class OwnedTensors {
 public:
  enum class Decays : unsigned char { betas, momentum };  ///< the decay rates of moments that the optimizer has

  /// @param optimizer  its name, for messages
  /// @throws UsageError on values out of range, or that the optimizer does not have
  [[gnu::cold]] OwnedTensors(std::string_view optimizer, Decays decays, TensorSettings const& settings,
                             TensorSelection selection, ParamGroups groups)
      : optimizer_(optimizer),
        decays_(decays),
        settings_(settings),
        selection_(std::move(selection)),
        groups_(std::move(groups)) {
    for (auto const& group : groups_) expect_known(group);
  }

  bool owns(std::string_view name) const { return selection_.contains(name); }

  [[gnu::cold]] TensorSettings of(TensorInfo const& tensor) const {
    auto settings = settings_;
    if (!tensor.decay) settings.weight_decay = 0.0f;
    for (auto const& group : groups_) {
      if (!matches(group.tensors, tensor.name)) continue;
      settings.weight_decay = group.weight_decay.value_or(settings.weight_decay);
      settings.lr_scale = group.lr_scale.value_or(settings.lr_scale);
      settings.first = (decays_ == Decays::betas ? group.beta1 : group.momentum).value_or(settings.first);
      settings.second = group.beta2.value_or(settings.second);
    }
    return settings;
  }
  /// Whether some tensor may have a momentum that is not 0.
  [[gnu::cold]] bool has_momentum() const {
    bool some = settings_.first > 0.0f;
    for (auto const& group : groups_) some = some || group.momentum.value_or(0.0f) > 0.0f;
    return some;
  }

  /// A description that is equal on all ranks.
  [[gnu::cold]] std::string text() const {
    auto text = formatted("tensors {}", selection_.text());
    auto const add = [&](char const* what, std::optional<float> value) {
      if (value) text += formatted(", {} {}", what, *value);
    };
    for (auto const& group : groups_) {
      text += formatted("; group '{}'", group.tensors);
      add("lr_scale", group.lr_scale);
      add("weight decay", group.weight_decay);
      add("beta1", group.beta1);
      add("beta2", group.beta2);
      add("momentum", group.momentum);
    }
    return text;
  }

  /// @throws UsageError if a pattern matches no tensor that trains, or the optimizer owns none
  [[gnu::cold]] void expect_matches(FixedArray<OwnedUnit> const& units) const {
    auto const all = TensorSelection::all();
    for (std::size_t rule = 0; rule < selection_.size(); ++rule)
      expect_match(units, "the pattern", selection_.pattern(rule), all);
    for (auto const& group : groups_) expect_match(units, "the group", group.tensors, selection_);
    bool owns_some = selection_.size() == 0;
    for (auto const& unit : units)
      for (auto const& tensor : unit.layout->tensors()) owns_some = owns_some || (!unit.frozen && owns(tensor.name));
    FSDP_EXPECTS(owns_some, "{}: no tensor that trains is among its tensors: {}", optimizer_, selection_.text());
  }

 private:
  [[gnu::cold]] void expect_known(ParamGroup const& group) const {
    auto const in_range = [&](char const* name, std::optional<float> value, float limit) {
      FSDP_EXPECTS(!value || (math::is_finite(*value) && *value >= 0.0f && *value < limit),
                   "{}: group '{}': {} must be finite, not negative{}, got {}", optimizer_, group.tensors, name,
                   limit == 1.0f ? " and below 1" : "", *value);
    };
    FSDP_EXPECTS(!group.tensors.empty(), "{}: a parameter group needs a pattern: {{.tensors = \"h.*\", ...}}",
                 optimizer_);
    FSDP_EXPECTS(decays_ == Decays::betas || (!group.beta1 && !group.beta2), "{}: group '{}': {} has no betas",
                 optimizer_, group.tensors, optimizer_);
    FSDP_EXPECTS(decays_ == Decays::momentum || !group.momentum, "{}: group '{}': {} has no momentum; set beta1",
                 optimizer_, group.tensors, optimizer_);
    in_range("lr_scale", group.lr_scale, 3e38f);
    in_range("weight_decay", group.weight_decay, 3e38f);
    in_range("beta1", group.beta1, 1.0f);
    in_range("beta2", group.beta2, 1.0f);
    in_range("momentum", group.momentum, 1.0f);
  }
  [[gnu::cold]] void expect_match(FixedArray<OwnedUnit> const& units, std::string_view what, std::string_view pattern,
                                  TensorSelection const& within) const {
    bool frozen = false;
    for (auto const& unit : units)
      for (auto const& tensor : unit.layout->tensors()) {
        if (!within.contains(tensor.name) || !matches(pattern, tensor.name)) continue;
        if (!unit.frozen) return;
        frozen = true;
      }
    fail<UsageError>("{}: {} '{}' matches {}", optimizer_, what, pattern,
                     frozen ? "only frozen tensors, which no optimizer updates" : "no tensor of the optimizer");
  }

  std::string_view optimizer_;
  Decays decays_;
  TensorSettings settings_;
  TensorSelection selection_;
  ParamGroups groups_;
};

}  // namespace detail
}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE
