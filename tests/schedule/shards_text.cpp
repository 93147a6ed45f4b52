// SPDX-License-Identifier: Apache-2.0
// The printed shards of an engine.
// skip-sanitizers
#include <string>
#include <utility>
#include <vector>

#include "fsdp/fsdp.hpp"
#include "fsdp/host.hpp"
#include "fsdp/local.hpp"
#include "tests/catch.hpp"
#include "tests/support/ramp.hpp"

TEST_CASE("each unit's padded shard is printed, a line each") {
  std::vector<std::string> texts(4);
  fsdp::local::run(4, fsdp::host::Device{}, [&](auto comm) {
    fsdp::Mesh mesh{std::move(comm)};
    fsdp::Engine engine{mesh, fsdp::HybridShard<>{.group = 2}};
    auto const body = engine.shard(fsdp::testing::Ramp{300}, "body");
    auto const head = engine.shard(fsdp::testing::Ramp{40}, "head", fsdp::NoShard{});
    engine.seal();
    texts[static_cast<std::size_t>(engine.rank())] = to_text(engine.shards());
  });
  CHECK(texts[1] ==
        "unit 'body': hybrid_shard(full_shard) over 2; 300 elements, padded to 512; rank 1: 256 to 512\n"
        "unit 'head': no_shard over 1; 40 elements, padded to 64; rank 1: 0 to 64\n");
  CHECK(texts[2].substr(0, texts[2].find('\n')) ==
        "unit 'body': hybrid_shard(full_shard) over 2; 300 elements, padded to 512; rank 2: 0 to 256");
}
