// SPDX-License-Identifier: Apache-2.0
// For each wait site of the schedule the runs that need it: without it a race decides what they compute.
#pragma once

#include <unistd.h>

#include <cstdlib>
#include <string>
#include <utility>
#include <vector>

#include "fsdp/detail/base/streams.hpp"
#include "fsdp/ema.hpp"
#include "fsdp/muon.hpp"
#include "fsdp/offload.hpp"
#include "tests/support/gradient_units.hpp"
#include "tests/support/in_child.hpp"
#include "tests/support/local_run.hpp"

namespace schedule {

using fsdp::WaitSite;

enum class Engine { full, hybrid, replicated, mixed, mixed_hybrid, muon, mixed_muon, offload, averages };

struct Case {
  WaitSite site;
  int prefetch;
  Engine engine;
  bool race_alone = false;  // values hardly ever show it: ThreadSanitizer must
  toy::Setting setting = toy::Setting::none;
  bool rounded = false;  // gradients travel in bf16, from wire buffers
};

// Where a site is implied by another in one configuration (gather_peers_read with two slots: a peer's next all-gather
// has begun), it is tested in one where it is not.
inline std::vector<Case> const cases{
    {WaitSite::compute_unsharded, 1, Engine::full},
    {WaitSite::compute_gradient_slot, 1, Engine::full},
    {WaitSite::gather_slot_read, 0, Engine::full},
    {WaitSite::gather_peers_read, 0, Engine::full},
    {WaitSite::gather_updated, 1, Engine::full},
    {WaitSite::gather_kept_slice, 2, Engine::full},
    {WaitSite::reduce_gradients, 1, Engine::full},
    {WaitSite::reduce_peers_read, 1, Engine::full},
    {WaitSite::reduce_partial_read, 1, Engine::hybrid},
    {WaitSite::replicate_scattered, 1, Engine::hybrid},
    {WaitSite::replicate_peers_read, 1, Engine::replicated},
    {WaitSite::replicate_scatter_peers, 1, Engine::hybrid, true},
    {WaitSite::optimizer_reduced, 1, Engine::full},
    {WaitSite::norm_peers_read, 1, Engine::full, true},
    {WaitSite::offload_fetched, 1, Engine::offload},
    {WaitSite::offload_used, 1, Engine::offload},
    {WaitSite::offload_stored, 1, Engine::averages},
    {WaitSite::optimizer_exchange, 1, Engine::muon},
    {WaitSite::optimizer_peers_read, 1, Engine::mixed_muon, true},
    {WaitSite::collective_peer_ready, 1, Engine::full},
    {WaitSite::collective_peer_partial, 1, Engine::replicated},
    // Units that differ: a replicated block between others that shard, one of which may stay until backward.
    {WaitSite::compute_unsharded, 1, Engine::mixed},
    {WaitSite::compute_gradient_slot, 1, Engine::mixed},
    {WaitSite::gather_slot_read, 0, Engine::mixed},
    {WaitSite::gather_peers_read, 0, Engine::mixed},
    {WaitSite::gather_updated, 1, Engine::mixed},
    {WaitSite::reduce_gradients, 1, Engine::mixed},
    {WaitSite::reduce_peers_read, 1, Engine::mixed},
    {WaitSite::reduce_partial_read, 1, Engine::mixed_hybrid},
    {WaitSite::replicate_scattered, 1, Engine::mixed_hybrid},
    {WaitSite::replicate_peers_read, 1, Engine::mixed, false, toy::Setting::none, true},
    {WaitSite::replicate_scatter_peers, 1, Engine::mixed_hybrid, true},
    {WaitSite::optimizer_reduced, 1, Engine::mixed},
    {WaitSite::norm_peers_read, 1, Engine::mixed, true},
    {WaitSite::collective_peer_ready, 1, Engine::mixed},
    {WaitSite::collective_peer_partial, 1, Engine::mixed},
    // Where nothing is zeroed, the same waits keep a slot from its next writer.
    {WaitSite::compute_gradient_slot, 1, Engine::full, false, toy::Setting::every},
    {WaitSite::reduce_peers_read, 1, Engine::full, false, toy::Setting::every},
    // Where gradients travel from wire buffers, the waits for peers keep those from their next content.
    {WaitSite::compute_gradient_slot, 1, Engine::full, false, toy::Setting::none, true},
    {WaitSite::reduce_gradients, 1, Engine::full, false, toy::Setting::none, true},
    {WaitSite::reduce_peers_read, 1, Engine::full, false, toy::Setting::none, true},
    {WaitSite::reduce_wire_read, 1, Engine::hybrid, false, toy::Setting::none, true},
    {WaitSite::reduce_wire_read, 1, Engine::mixed_hybrid, false, toy::Setting::none, true},
    {WaitSite::replicate_scattered, 1, Engine::hybrid, false, toy::Setting::none, true},
    {WaitSite::reduce_peers_read, 1, Engine::hybrid, true, toy::Setting::none, true},
    {WaitSite::replicate_peers_read, 1, Engine::hybrid, true, toy::Setting::none, true},
    {WaitSite::replicate_peers_read, 1, Engine::replicated, false, toy::Setting::none, true},
    {WaitSite::optimizer_reduced, 1, Engine::full, false, toy::Setting::none, true},
};

inline toy::Run small_run(Case const& tested) {
  toy::Run run;
  run.steps = 4;
  run.shard_group = 2;
  run.options.prefetch = tested.prefetch;
  run.options.bucket_bytes = 2048;
  run.options.first_bucket_bytes = 512;
  run.shape.hidden = {17, 17, 17};
  run.shape.setting = tested.setting;
  if (tested.rounded) run.options.reduce_dtype = fsdp::DType::bf16;
  if (tested.site == WaitSite::gather_kept_slice) {
    // Three slots: backward gathers the last block into the one that the first block has left, which says nothing of
    // the last block's copy.
    run.options.reshard_ranks = 2;
    run.options.keep_last = false;
  }
  if (tested.site == WaitSite::reduce_partial_read) {
    // Every micro-step all-reduces: the next one adds to the same partial shards, with no optimizer step between.
    run.options.allow_no_replica_sync = true;
    run.micro_steps = 3;
  }
  if (!tested.rounded && tested.site == WaitSite::replicate_peers_read) {
    // Every micro-step makes means in place, and the next one adds to them with no optimizer step between.
    run.shape.hidden.clear();
    run.micro_steps = 3;
  }
  if (tested.rounded && tested.site == WaitSite::reduce_peers_read && tested.engine == Engine::hybrid) {
    // One unit alone has one wire buffer, which the next micro-step writes with no optimizer step between. With two
    // buffers the next unit's reduce-scatter says that peers have read this one's.
    run.shape.hidden.clear();
    run.micro_steps = 3;
  }
  run.relative_clip =
      tested.site == WaitSite::norm_peers_read;  // otherwise implied: the next gradients wait for all ranks
  if (run.relative_clip) run.clip = 0.5f;
  return run;
}

/// Trains with optimizers that have streams and collectives of their own, on four threads. @return the full parameters
template <class Device>
std::vector<float> train_by_optimizers(Engine which, toy::Run const& run, Device const& device) {
  std::vector<float> result;
  fsdp::local::run(4, device, [&](fsdp::local::Communicator<Device> comm) {
    bool const first = comm.rank() == 0;
    auto mine = toy::train_by(fsdp::FullShard{}, std::move(comm), run, [&](auto& engine, auto const& loop) {
      if (which == Engine::offload) {
        fsdp::offload(engine, {.moments = true, .gradients = true});
        fsdp::AdamW adamw(engine);
        return loop([&](float lr, auto const& norm) { adamw.step(lr, norm); }, 1e-2f);
      }
      fsdp::Muon muon(engine, fsdp::TensorSelection::all(), {.iterations = 2});
      fsdp::AdamW adamw(engine, muon.rest());
      fsdp::Optimizers both(muon, adamw);
      loop([&](float lr, auto const& norm) { both.step({lr, lr}, norm); }, 1e-2f);
    });
    if (first) result = std::move(mine);
  });
  return result;
}

/// Trains with averages of masters that lie in host memory. @return the averages
template <class Device>
std::vector<float> train_averages(toy::Run const& run, Device const& device) {
  std::vector<float> result;
  fsdp::local::run(2, device, [&](fsdp::local::Communicator<Device> comm) {
    bool const first = comm.rank() == 0;
    fsdp::Mesh mesh(std::move(comm));
    fsdp::Engine engine(mesh, fsdp::FullShard{}, fsdp::Bf16{}, run.options);
    toy::Patches<decltype(engine)> patches(engine);
    fsdp::offload(engine, {.masters = true});
    fsdp::Sgd sgd(engine);
    fsdp::Ema ema(engine, 0.5f);
    for (int step = 0; step < run.steps; ++step) {
      patches.step({.step = step});
      sgd.step(0.1f);
      ema.update();
    }
    auto const swapped = ema.swap();
    auto mine = toy::all_parameters(engine);
    if (first) result = std::move(mine);
  });
  return result;
}

/// Trains on four threads. @return the full parameters
template <class Device>
std::vector<float> train(Engine engine, toy::Run run, Device const& device) {
  if (engine == Engine::averages) return train_averages(run, device);
  fsdp::HybridShard<> const hybrid{.group = 2};
  if (engine == Engine::mixed || engine == Engine::mixed_hybrid || engine == Engine::mixed_muon) {
    run.shape.hidden.resize(5, run.shape.hidden[0]);  // so many that those that take buffers in turn do so
    run.shape.strategies = {{}, {}, fsdp::NoShard{}};
  }
  if (engine == Engine::muon || engine == Engine::mixed_muon || engine == Engine::offload)
    return train_by_optimizers(engine, run, device);
  if (engine == Engine::mixed) run.shape.strategies.push_back(fsdp::ShardGradOp{});
  if (engine == Engine::hybrid || engine == Engine::mixed_hybrid) return toy::train_local(hybrid, 4, run, device);
  if (engine == Engine::replicated) return toy::train_local(fsdp::NoShard{}, 4, run, device);
  return toy::train_local(fsdp::FullShard{}, 4, run, device);
}

constexpr char const* child_variable = "FSDP_TEST_DROP";

/// Runs this program's test "child" as a program anew: a race may do anything. @param what  child_variable's value
/// there
inline fsdp::testing::ChildOutcome run_child_test(std::string const& what) {
  return fsdp::testing::in_child([&] {
    ::setenv(child_variable, what.c_str(), 1);
    ::execl("/proc/self/exe", "waits", "[.child]", static_cast<char*>(nullptr));
    std::_Exit(99);
  });
}

}  // namespace schedule
