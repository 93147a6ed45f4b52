// SPDX-License-Identifier: Apache-2.0
// Byte-pair encoding of one word: merges pairs of symbols by rank.
#include "transformer/tokenizer/merges.hpp"

#include <algorithm>
#include <bit>
#include <functional>
#include <queue>
#include <utility>

namespace transformer {
namespace {

constexpr std::size_t longest_short = 128;

std::uint64_t pair_of(Merges::Id left, Merges::Id right) {
  return std::uint64_t{static_cast<std::uint32_t>(left)} << 32 | static_cast<std::uint32_t>(right);
}

}  // namespace

Merges::Merges(std::size_t count) : table_(std::bit_ceil(2 * count + 2)) {}

std::size_t Merges::place(std::uint64_t pair) const {
  auto const mask = table_.size() - 1;
  auto at = static_cast<std::size_t>(pair * 0x9e3779b97f4a7c15u >> 32) & mask;  // Fibonacci hashing
  while (table_[at].pair != pair && table_[at].pair != no_pair) at = (at + 1) & mask;
  return at;
}

void Merges::add(Id left, Id right, Merge merge) {
  table_[place(pair_of(left, right))] = {pair_of(left, right), merge};
}

Merges::Merge Merges::find(Id left, Id right) const { return table_[place(pair_of(left, right))].merge; }

void Merges::apply(std::vector<Id>& symbols) const {
  if (symbols.size() <= longest_short) return apply_to_short(symbols);
  apply_to_long(symbols);
}

void Merges::apply_to_short(std::vector<Id>& symbols) const {
  if (symbols.size() < 2) return;
  std::vector<Merge> merges(symbols.size() - 1);  // of each symbol and the next
  for (std::size_t i = 0; i < merges.size(); ++i) merges[i] = find(symbols[i], symbols[i + 1]);
  auto const lower = [](Merge const& a, Merge const& b) { return a.rank < b.rank; };
  while (!merges.empty()) {
    auto const best = std::min_element(merges.begin(), merges.end(), lower);  // the leftmost of equals
    if (best->rank == no_rank) return;
    auto const at = best - merges.begin();
    auto const i = static_cast<std::size_t>(at);
    symbols[i] = best->merged;
    symbols.erase(symbols.begin() + at + 1);
    merges.erase(best);
    if (i < merges.size()) merges[i] = find(symbols[i], symbols[i + 1]);
    if (i > 0) merges[i - 1] = find(symbols[i - 1], symbols[i]);
  }
}

void Merges::apply_to_long(std::vector<Id>& symbols) const {
  constexpr auto none = SIZE_MAX;
  constexpr Id gone = -1;
  struct Links {
    std::size_t before, behind;
  };
  auto const count = symbols.size();
  std::vector<Links> links(count);
  for (std::size_t i = 0; i < count; ++i) links[i] = {i == 0 ? none : i - 1, i + 1 == count ? none : i + 1};

  // Rank and place of the pair's left symbol. What was merged meanwhile is noticed when it comes out.
  using Candidate = std::pair<std::int32_t, std::size_t>;
  std::vector<Candidate> candidates;
  auto const merge_at = [&](std::size_t i) {
    return symbols[i] == gone || links[i].behind == none ? Merge{} : find(symbols[i], symbols[links[i].behind]);
  };
  for (std::size_t i = 0; i < count; ++i)
    if (auto const merge = merge_at(i); merge.rank != no_rank) candidates.emplace_back(merge.rank, i);
  std::priority_queue queue(std::greater<Candidate>{}, std::move(candidates));
  while (!queue.empty()) {
    auto const [rank, i] = queue.top();
    queue.pop();
    auto const merge = merge_at(i);
    if (merge.rank != rank) continue;
    auto const right = links[i].behind;
    symbols[i] = merge.merged;
    symbols[right] = gone;
    links[i].behind = links[right].behind;
    if (links[i].behind != none) links[links[i].behind].before = i;
    for (auto const left : {links[i].before, i})
      if (left != none)
        if (auto const next = merge_at(left); next.rank != no_rank) queue.emplace(next.rank, left);
  }
  std::erase(symbols, gone);
}

}  // namespace transformer
