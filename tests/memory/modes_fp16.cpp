// SPDX-License-Identifier: Apache-2.0
// Reserved and live bytes in fp16, to the byte: every strategy and way to accumulate.
// skip-sanitizers
#include "tests/memory/modes.hpp"

TEST_CASE("account, plan and formulas agree in fp16") { modes::check_all<fsdp::Fp16>(); }
