// SPDX-License-Identifier: Apache-2.0
// Messages that ranks exchange when a snapshot begins.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "fsdp/checkpoint/hash.hpp"
#include "fsdp/checkpoint/json.hpp"
#include "fsdp/checkpoint/manifest.hpp"
#include "fsdp/error.hpp"
#include "fsdp/tensor.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE::checkpoint {

/// A rank's message about the last snapshot, and rank 0's answer.
struct SnapshotWord {
  char state =
      '=';  ///< '=' written, '~' being written, '!' failed, 'M' no memory for the next one, 'C' `extra` is no JSON
  std::string id;    ///< random id of this rank
  std::string what;  ///< is to be saved
  std::string error;

  std::string text() const { return formatted("{}{}{:016x}{}", state, id, checksum_of(what), error); }
  static constexpr std::size_t id_at = 1, what_at = 17, error_at = 33;
};

/// Answers with a state and rank 0's id, then a warning: '=' or '!' the snapshot begins, and the one before is whole or
/// not; '~' or 'M' it does not begin; 'C' and 'X' are errors.
inline std::string answer_to_words(std::vector<std::string> const& words) {
  using W = SnapshotWord;
  auto const id = words[0].substr(W::id_at, 16);
  auto const find = [&](char state) -> std::string {
    for (std::size_t rank = 0; rank < words.size(); ++rank)
      if (words[rank][0] == state) return formatted("rank {}: {}", rank, words[rank].substr(W::error_at));
    return {};
  };
  for (std::size_t rank = 1; rank < words.size(); ++rank)
    if (words[rank].compare(W::what_at, 16, words[0], W::what_at, 16) != 0)
      return "X" + id + formatted("rank {} takes a snapshot of another step or state than rank 0", rank);
  if (auto const wrong = find('C'); !wrong.empty()) return "C" + id + wrong;
  if (auto const busy = find('~'); !busy.empty()) return "~" + id + "the one before is still being written";
  if (auto const memory = find('M'); !memory.empty()) return "M" + id + memory;
  if (auto const failed = find('!'); !failed.empty()) return "!" + id + failed;
  return "=" + id;
}

/// A member's slices, as text for the rank that keeps a copy. @param manifest  see SnapshotHeader
inline std::string slices_text(std::vector<Slice> const& slices, std::string const& node, std::string_view manifest) {
  auto list = Json::array();
  for (auto const& slice : slices)
    list.push_back({slice.array, slice.tensor, name(slice.dtype), slice.first, slice.count});
  return Json{{"node", node}, {"slices", std::move(list)}, {"manifest", manifest}}.dump();
}
struct MemberSlices {
  std::vector<Slice> slices;
  std::string node, manifest;
  std::int64_t bytes = 0;
};
inline MemberSlices parse_slices(std::string const& text) {
  constexpr char const* what = "a snapshot's slices";
  auto const json = parse_object(text, what);
  Fields const fields(json, what);
  MemberSlices member{{}, fields.text("node"), fields.text("manifest"), 0};
  for (auto const& item : fields.array("slices")) {
    Slice slice;
    slice.array = item.at(0).get<std::string>();
    slice.tensor = item.at(1).get<std::string>();
    for (auto const type : {DType::f32, DType::bf16, DType::f16})
      if (item.at(2).get<std::string>() == name(type)) slice.dtype = type;
    slice.first = item.at(3).get<std::int64_t>();
    slice.count = item.at(4).get<std::int64_t>();
    member.bytes += slice.bytes();
    member.slices.push_back(std::move(slice));
  }
  return member;
}

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE::checkpoint
