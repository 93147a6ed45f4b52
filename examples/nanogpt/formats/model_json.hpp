// SPDX-License-Identifier: Apache-2.0
// The shape of a model as JSON, for config.json and checkpoints.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string_view>

#include "fsdp/version.hpp"
#include "nanogpt/gpt_config.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE::checkpoint {
class Fields;
}

namespace nanogpt {

/// The fields that files of all makers have: layers, heads, width, vocabulary, and how long a block may be.
/// @param positions  the name of the last of these
/// @throws fsdp::ConfigError if one is missing, or below 1
GptConfig shape_from(fsdp::checkpoint::Fields const& fields, char const* positions);

/// All of it but dropout, which is training's.
nlohmann::ordered_json model_json(GptConfig const& config);

/// Without "activation", as earlier versions wrote it, GELU is the exact one.
/// @param what  the object is called in messages
/// @throws fsdp::ConfigError if a field is missing or wrong, or there is no such model
GptConfig model_from(nlohmann::ordered_json const& object, std::string_view what);

}  // namespace nanogpt
