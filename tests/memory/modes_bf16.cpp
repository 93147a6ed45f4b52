// SPDX-License-Identifier: Apache-2.0
// Reserved and live bytes in bf16, to the byte: every strategy and way to accumulate.
// skip-sanitizers
#include "tests/memory/modes.hpp"

TEST_CASE("account, plan and formulas agree in bf16") { modes::check_all<fsdp::Bf16>(); }

TEST_CASE("bf16 masters: parameter shards of half the size") {
  modes::Setup setup;
  modes::check<fsdp::Precision<fsdp::bf16, float, fsdp::bf16>>(fsdp::FullShard{}, setup);
  modes::check<fsdp::Precision<fsdp::bf16, float, fsdp::bf16>>(fsdp::NoShard{}, setup);
}
