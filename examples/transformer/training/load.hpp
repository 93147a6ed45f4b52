// SPDX-License-Identifier: Apache-2.0
// Loads the checkpoint that a run continues from, or the newest complete one if it is damaged.
#pragma once

#include <fmt/format.h>

#include <cstdio>
#include <filesystem>
#include <string>

#include "fsdp/checkpoint.hpp"
#include "fsdp/error.hpp"
#include "fsdp/snapshots.hpp"
#include "transformer/launch/refusals.hpp"
#include "transformer/report/escape.hpp"
#include "transformer/training/preparation.hpp"
#include "transformer/training/settings_of_run.hpp"
#include "transformer/training/state.hpp"
#include "transformer/training/whole_checkpoints.hpp"

namespace transformer {

/// Loads the snapshot that `ready.resumed` is the state of. If that fails, `ready.resumed` becomes the checkpoint in
/// out_dir.
/// @return whether it is loaded
/// @throws AgreedError on every rank if there is no checkpoint either
/// @note Collective: yes.
template <class T>
bool load_run_snapshot(T& trainer, Preparation<typename T::Program>& ready) {
  std::string why;
  try {
    fsdp::load_snapshot(trainer.engine(), trainer.optimizer(), *ready.snapshot);
    return true;
  } catch (fsdp::ConfigError const& error) {  // on every rank
    why = error.what();
  } catch (fsdp::ResourceError const& error) {  // on every rank
    why = error.what();
  }
  if (!ready.on_disk || !ready.on_disk->run)
    throw AgreedError(fmt::format("{} cannot be loaded: {}. '{}' has no checkpoint", ready.snapshot->name(), why,
                                  ready.settings.out_dir));
  if (trainer.engine().rank() == 0)
    fmt::print("note: {} cannot be loaded: {}; continuing from {}\n", ready.snapshot->name(), report::printable(why),
               ready.on_disk->run->checkpoint.string());
  ready.resumed = std::move(ready.on_disk->run);
  ready.snapshot.reset();
  ready.keeps_snapshots = false;
  return false;
}

/// Loads `ready.resumed` into the engine and the optimizer. If that is damaged, init_from=auto takes the newest whole
/// checkpoint of out_dir instead, and `ready.resumed` becomes that. Other checkpoints are read only then, by rank 0.
/// @throws AgreedError on every rank if nothing can be loaded, naming the checkpoints that are whole
/// @note Collective: yes.
template <class T>
void load_run(T& trainer, Preparation<typename T::Program>& ready) {
  if (ready.snapshot && load_run_snapshot(trainer, ready)) return;
  auto& world = trainer.engine().world();
  std::filesystem::path const out_dir(ready.settings.out_dir);
  bool const first = world.rank() == 0;
  for (bool second = false;; second = true) {
    auto const from = ready.resumed->checkpoint;
    std::string why;
    try {
      fsdp::load(trainer.engine(), trainer.optimizer(), from);
      return;
    } catch (fsdp::ConfigError const& error) {  // on every rank
      why = error.what();
    }
    bool const automatic = ready.settings.init_from == "auto" && !second;
    std::string name;
    agree(world, [&] {
      if (!first) return;
      std::fflush(stdout);
      auto const damaged = from.filename().string();
      if (fault_of(from).empty())
        fsdp::fail<fsdp::ConfigError>("{}{}", why, other_tuning(ready.settings, *ready.resumed));
      if (automatic)
        name = newest_whole(out_dir, damaged, why);
      else
        fsdp::fail<fsdp::ConfigError>("{}{}", why,
                                      other_checkpoints(out_dir, damaged, "; --init_from=auto takes the newest"));
    });
    name = world.exchange(name, "another checkpoint").front();
    agree(world, [&] {
      auto run = read_run(out_dir / name);
      if (run.model != ready.resumed->model)
        fsdp::fail<fsdp::ConfigError>("{}. The newest whole checkpoint, '{}', belongs to another model", why,
                                      run.checkpoint.string());
      ready.resumed = run;
    });
    if (first)
      fmt::print("note: {}; continuing from {}, the newest whole checkpoint\n", report::printable(why),
                 ready.resumed->checkpoint.string());
  }
}

}  // namespace transformer
