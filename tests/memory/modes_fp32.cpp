// SPDX-License-Identifier: Apache-2.0
// Reserved and live bytes in fp32, to the byte: every strategy and way to accumulate.
// skip-sanitizers
#include "tests/memory/modes.hpp"

TEST_CASE("account, plan and formulas agree in fp32") { modes::check_all<fsdp::Fp32>(); }

TEST_CASE("account, plan and formulas agree where fp32 gradients travel in bf16") {
  modes::check_all<fsdp::Fp32>({.reduce_dtype = fsdp::DType::bf16});
}

TEST_CASE("units of unequal size: the window that is largest") {
  modes::Setup setup;
  setup.root = 0;
  setup.blocks = {4 * 256, 1 * 256, 8 * 256, 2 * 256, 3 * 256};
  auto const m = modes::measure<fsdp::Fp32>(fsdp::FullShard{}, setup);
  modes::check_plan(m);
  std::int64_t const unit = 256 * 4, rest = 18 * unit;  // 4 S over 4 ranks
  CHECK(m.bytes.rest == rest);
  CHECK(m.bytes.reserved == rest + (2 + 2) * 8 * unit);
  CHECK(m.bytes.forward == rest + (8 + 2) * unit);                    // while block 2 computes
  CHECK(m.bytes.backward == rest + (1 + 8) * unit + (8 + 2) * unit);  // the same, and gradients of blocks 3 and 2
  setup.options.keep_last = false;
  modes::check_plan(modes::measure<fsdp::Fp32>(fsdp::FullShard{}, setup));
}

TEST_CASE("options that keep more, or less") {
  modes::Setup setup;
  std::int64_t const U = 1536 * 4, B = 768 * 4, n = 5, S = (n * U + B) / 4;
  SECTION("backward's own depth") {
    setup.options.prefetch = 0;
    setup.options.backward_prefetch = 2;
    auto const m = modes::measure<fsdp::Fp32>(fsdp::FullShard{}, setup);
    modes::check_plan(m);
    CHECK(m.bytes.forward == 4 * S + U + B);
    CHECK(m.bytes.backward == 4 * S + (3 + 2) * U + 2 * B);
    CHECK(m.bytes.reserved == 4 * S + (3 + 2) * U + 2 * B);
  }
  SECTION("a cap of one block ahead, whatever the depth") {
    setup.options.prefetch = 4;
    setup.options.max_ahead_bytes = U;
    auto const m = modes::measure<fsdp::Fp32>(fsdp::FullShard{}, setup);
    modes::check_plan(m);
    CHECK(m.bytes.reserved == 4 * S + (2 + 2) * U + 2 * B);
  }
  SECTION("a smaller group after forward: a slice of each block that is dropped") {
    setup.options.reshard_ranks = 2;
    auto const m = modes::measure<fsdp::Fp32>(fsdp::FullShard{}, setup);
    modes::check_plan(m);
    CHECK(m.bytes.reserved == 4 * S + (2 + 2) * U + 2 * B + (n - 1) * U / 2);
    CHECK(m.bytes.forward == 4 * S + 2 * U + B + (n - 1) * U / 2);  // the last slice is copied while its block is there
  }
  SECTION("a buffer for every unit") {
    setup.options.allow_keep_unsharded = true;
    auto const m = modes::measure<fsdp::Fp32>(fsdp::FullShard{}, setup);
    modes::check_plan(m);
    CHECK(m.bytes.reserved == 4 * S + 4 * S + 2 * U + B);
    CHECK(m.bytes.forward == 4 * S + 2 * U + B);
  }
}

TEST_CASE("after 1,000 steps as after 2") {
  modes::Setup setup;
  setup.ranks = 2;
  setup.blocks = {300, 200, 700};
  for (auto const mode : {modes::Mode::synced, modes::Mode::unsynced}) {
    setup.mode = mode;
    modes::check_plan(modes::measure<fsdp::Fp32>(fsdp::FullShard{}, setup, 1000));
    modes::check_plan(modes::measure<fsdp::Fp32>(fsdp::NoShard{}, setup, 1000));
  }
}
