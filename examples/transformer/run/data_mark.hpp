// SPDX-License-Identifier: Apache-2.0
// Marks by which a checkpoint recognises the data that its run was trained on.
#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "transformer/data/dataset.hpp"
#include "transformer/run/choices.hpp"
#include "transformer/run/table.hpp"

namespace transformer {

/// Tells the tokens of a split apart from others. Where the files are and when they were written does not count.
struct TokensMark {
  std::int64_t tokens = 0;  ///< 0: not known
  std::int64_t files = 0;
  std::string checksum;  ///< of each file's size, and of its tokens: all of them, or the first, middle and last 64 KiB
  bool operator==(TokensMark const&) const = default;
};

/// Both splits.
struct RunData {
  TokensMark train, val;
};

/// Reads at most 192 KiB of each file.
RunData mark_of(Dataset const& dataset);

nlohmann::ordered_json run_data_json(RunData const& data);
/// @param what  the object is, for messages
/// @throws fsdp::ConfigError
RunData run_data_from(nlohmann::ordered_json const& json, std::string_view what);

/// Compares the data of a run that is resumed with those that it is to go on with. A split that differs is refused
/// unless this start has set dataset, train_data or, for validation, val_data.
/// @param from  the checkpoint, for messages
/// @return lines to print
/// @throws fsdp::ConfigError naming what differs
std::vector<std::string> compare_data(Settings const& settings, RunData const& had, RunData const& has,
                                      std::string_view from);

}  // namespace transformer
