// SPDX-License-Identifier: Apache-2.0
#include "transformer/training/snapshots.hpp"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <span>
#include <system_error>

#include "fsdp/checkpoint.hpp"
#include "fsdp/files.hpp"
#include "transformer/launch/program.hpp"

namespace transformer {
namespace {

namespace ckpt = fsdp::checkpoint;

/// Checksum of this program's file.
std::string own_build() {
  return ckpt::reading_for_a_save([] {
    ckpt::InputFile const file("/proc/self/exe");
    std::vector<std::byte> block(std::size_t{1} << 20);
    std::string sums;
    for (std::int64_t at = 0; at < file.size(); at += static_cast<std::int64_t>(block.size())) {
      auto const part = std::span(block).first(
          static_cast<std::size_t>(std::min<std::int64_t>(static_cast<std::int64_t>(block.size()), file.size() - at)));
      file.read(at, part);
      sums += ckpt::checksum_text(ckpt::checksum_of(part));
    }
    return ckpt::checksum_text(ckpt::checksum_of(sums));
  });
}

}  // namespace

fsdp::SnapshotPlace snapshot_place(std::filesystem::path const& folder, std::filesystem::path const& out_dir) {
  static std::string const build = own_build();
  auto node = folder;
  if (auto const* const name = std::getenv("FSDP_SNAPSHOT_NODE"); name != nullptr && *name != '\0')
    node += std::string(".") + name;
  std::error_code error;
  auto run = std::filesystem::weakly_canonical(out_dir, error);
  if (error) run = std::filesystem::absolute(out_dir, error);
  return {node, fmt::format("{} {}", program_name, run.string()), build};
}

std::optional<ChosenRun> run_on_disk(Settings const& settings) {
  try {
    return choose_run(settings, false);
  } catch (fsdp::Error const&) {  // said later, if no snapshot takes its place
    return std::nullopt;
  }
}

std::string lineage_of(RunState const& run) { return run.lineage.empty() ? run.start : run.lineage; }

std::string note_on_snapshots_of(RunState const& run) {
  auto const folder = run.settings.find("snapshot_folder"), interval = run.settings.find("snapshot_interval");
  if (folder == run.settings.end() || folder->second.empty() || interval == run.settings.end()) return {};
  return fmt::format(
      "note: the run kept snapshots in '{0}'; this start neither looks for them nor takes any: give "
      "--snapshot_folder={0} --snapshot_interval={1} for that",
      folder->second, interval->second);
}

std::string refusal_of(fsdp::FoundSnapshot const& found, std::optional<RunState> const& on_disk, std::string out_dir) {
  try {
    auto const run = read_run(found.folder, found.texts.manifest);
    if (!on_disk) return {};
    if (run.model != on_disk->model) return fmt::format("{} belongs to another model", found.name());
    if (auto const own = lineage_of(*on_disk); !own.empty() && lineage_of(run) != own)
      return fmt::format("{} belongs to another run in '{}'", found.name(), out_dir);
    if (run.iteration <= on_disk->iteration)
      return fmt::format("{} is not newer than '{}'", found.name(), on_disk->checkpoint.string());
    return {};
  } catch (fsdp::ConfigError const& error) {
    return error.what();
  }
}

}  // namespace transformer
