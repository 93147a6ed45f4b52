// SPDX-License-Identifier: Apache-2.0
// Encodes and parses the texts that ranks exchange over TCP at the start of a run.
#pragma once

#include <algorithm>
#include <array>
#include <charconv>
#include <cstddef>
#include <cstdint>
#include <string>
#include <system_error>
#include <vector>

#include "fsdp/error.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE::bootstrap::detail {

/// Answers of rank 0: one for every rank, or one for all.
using Answers = std::vector<std::string>;

/// @param rank  who has sent it
template <class T>
T number(std::string const& text, int rank) {
  T value{};
  auto const [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc{} || end != text.data() + text.size())
    fail<PeerError>("rank {} sent '{}', expected a whole number: do all ranks run the same version of this program?",
                    rank, text);
  return value;
}

/// Three words separated by single spaces.
inline std::array<std::string, 3> words(std::string const& text) {
  auto const first = text.find(' ');
  auto const second = first == std::string::npos ? first : text.find(' ', first + 1);
  if (second == std::string::npos)
    fail<PeerError>("the ranks' first messages: expected three words, got '{}'; does another program use this port?",
                    text);
  return {text.substr(0, first), text.substr(first + 1, second - first - 1), text.substr(second + 1)};
}

/// Every rank's rank and number of ranks in its part of a split, and rank 0's host.
/// @param wishes  color, key and host of every rank   @param first  see split
inline Answers places(std::vector<std::string> const& wishes, std::vector<int>& first) {
  struct Wish {
    int color, key, rank;
    auto operator<=>(Wish const&) const = default;
  };
  std::vector<Wish> sorted;
  for (int rank = 0; auto const& wish : wishes) {
    auto const word = words(wish);
    sorted.push_back({number<int>(word[0], rank), number<int>(word[1], rank), rank});
    ++rank;
  }
  std::sort(sorted.begin(), sorted.end());
  Answers answers(wishes.size());
  first.resize(wishes.size());
  auto const host = words(wishes[0])[2];
  for (auto part = sorted.begin(); part != sorted.end();) {
    auto const end = std::find_if(part, sorted.end(), [&](Wish const& wish) { return wish.color != part->color; });
    for (auto member = part; member != end; ++member) {
      auto const rank = static_cast<std::size_t>(member->rank);
      answers[rank] = formatted("{} {} {}", member - part, end - part, host);
      first[rank] = part->rank;
    }
    part = end;
  }
  return answers;
}

/// Every text's length, then the texts.
inline std::string packed(std::vector<std::string> const& texts) {
  std::string all;
  for (auto const& text : texts) {
    std::uint64_t const bytes = text.size();
    all.append(reinterpret_cast<char const*>(&bytes), sizeof(bytes));
  }
  for (auto const& text : texts) all += text;
  return all;
}
inline std::vector<std::string> unpacked(int size, std::string const& all) {
  std::vector<std::string> texts(static_cast<std::size_t>(size));
  std::size_t offset = texts.size() * sizeof(std::uint64_t);
  for (std::size_t rank = 0; rank < texts.size(); ++rank) {
    std::uint64_t bytes = 0;
    if (offset <= all.size())
      std::copy_n(all.data() + rank * sizeof(bytes), sizeof(bytes), reinterpret_cast<char*>(&bytes));
    if (offset > all.size() || bytes > all.size() - offset)
      fail<PeerError>(
          "rank 0 sent a malformed answer to an exchange: do all ranks run the same version of this program?");
    texts[rank] = all.substr(offset, bytes);
    offset += bytes;
  }
  return texts;
}

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE::bootstrap::detail
