// SPDX-License-Identifier: Apache-2.0
// Full weights between an engine and files: transformer's, where nanogpt's sources look for them.
#pragma once

#include "gpt_config.hpp"
#include "transformer/weights/engine_weights.hpp"  // IWYU pragma: export
