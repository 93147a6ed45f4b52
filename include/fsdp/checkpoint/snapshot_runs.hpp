// SPDX-License-Identifier: Apache-2.0
// Lists of numbers as short texts, in which ranks tell rank 0 of nodes and of holders of slices.
#pragma once

#include <cstddef>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "fsdp/error.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE::checkpoint {

/// Encodes numbers: a word "count:first:by" for each run of numbers that grow by `by`, 0 or 1.
inline std::string runs_text(std::vector<int> const& values) {
  std::string text;
  for (std::size_t begin = 0; begin < values.size();) {
    std::size_t end = begin + 1;
    int const by = end < values.size() && values[end] == values[begin] + 1 ? 1 : 0;
    while (end < values.size() && values[end] == values[end - 1] + by) ++end;
    text += formatted("{}:{}:{} ", end - begin, values[begin], by);
    begin = end;
  }
  return text;
}
inline std::vector<int> parse_runs(std::string const& text) {
  std::vector<int> values;
  std::istringstream words(text);
  std::size_t count = 0;
  int value = 0, by = 0;
  for (char colon = 0; words >> count >> colon >> value >> colon >> by;)
    for (std::size_t i = 0; i < count; ++i, value += by) values.push_back(value);
  return values;
}

/// Answer of rank 0: the union of the numbers that ranks list, as runs_text(), from texts of runs_text().
inline std::string united_runs(std::vector<std::string> const& texts) {
  std::set<int> all;
  for (auto const& text : texts)
    for (auto const value : parse_runs(text)) all.insert(value);
  return runs_text({all.begin(), all.end()});
}

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE::checkpoint
