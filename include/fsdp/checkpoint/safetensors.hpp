// SPDX-License-Identifier: Apache-2.0
// The safetensors file format: https://github.com/huggingface/safetensors says what it is.
#pragma once

#include "fsdp/checkpoint/safetensors_file.hpp"    // IWYU pragma: export
#include "fsdp/checkpoint/safetensors_writer.hpp"  // IWYU pragma: export
