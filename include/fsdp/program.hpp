// SPDX-License-Identifier: Apache-2.0
// Programs of steps: compiled, printed and measured with or without an engine.
#pragma once

#include "fsdp/detail/step/compile_program.hpp"
#include "fsdp/detail/step/input.hpp"
#include "fsdp/detail/step/memory_plan.hpp"
#include "fsdp/detail/step/program.hpp"
#include "fsdp/detail/step/program_text.hpp"
