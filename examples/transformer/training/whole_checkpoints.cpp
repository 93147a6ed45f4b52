// SPDX-License-Identifier: Apache-2.0
#include "transformer/training/whole_checkpoints.hpp"

#include <algorithm>
#include <exception>
#include <system_error>
#include <utility>
#include <vector>

#include "fsdp/checkpoint.hpp"
#include "fsdp/error.hpp"
#include "fsdp/files.hpp"
#include "transformer/training/folder.hpp"

namespace transformer {
namespace {

namespace fs = std::filesystem;
namespace ckpt = fsdp::checkpoint;

/// All folders step-N, the newest first. Those that are not even described are the last.
std::vector<std::string> checkpoints_in(fs::path const& out_dir) {
  std::error_code error;
  if (!fs::is_directory(out_dir, error)) return {};
  std::vector<std::string> names;
  for (auto const& checkpoint : ckpt::CheckpointList(out_dir).checkpoints) names.push_back(checkpoint.text());
  std::reverse(names.begin(), names.end());
  for (auto const& entry : fs::directory_iterator(out_dir, error)) {
    auto const name = entry.path().filename().string();
    if (ckpt::CheckpointName::parse(name) && entry.is_directory(error) &&
        std::find(names.begin(), names.end(), name) == names.end())
      names.push_back(name);
  }
  return names;
}

[[noreturn]] void refuse_all(fs::path const& out_dir, std::vector<std::string> const& faults) {
  std::string text;
  for (auto const& fault : faults) text += "; " + fault;
  fsdp::fail<fsdp::ConfigError>(
      "setting 'init_from': no checkpoint in '{}' can be loaded{}. For a new run take another out_dir, or give "
      "--overwrite with --init_from=scratch",
      out_dir.string(), text);
}

}  // namespace

std::string fault_of(fs::path const& checkpoint) {
  try {
    static_cast<void>(read_run(checkpoint));
    auto const path = checkpoint / ckpt::manifest_name;
    ckpt::ShardedReader reader(
        checkpoint, ckpt::parse_manifest(ckpt::read_text_file(path), fsdp::formatted("'{}'", path.string())));
    for (auto const& array : reader.manifest().arrays)
      for (auto const& tensor : reader.manifest().tensors)
        if (reader.has(array.name, tensor.name)) reader.read(array.name, tensor.name, 0, tensor.numel, [](auto...) {});
    return {};
  } catch (std::exception const& error) {
    return error.what();
  }
}

std::string newest_whole(fs::path const& out_dir, std::string_view damaged, std::string const& why) {
  std::vector<std::string> faults{why};
  for (auto const& name : checkpoints_in(out_dir)) {
    if (name == damaged) continue;
    auto fault = fault_of(out_dir / name);
    if (fault.empty()) return name;
    faults.push_back(std::move(fault));
  }
  refuse_all(out_dir, faults);
}

std::string other_checkpoints(fs::path const& out_dir, std::string_view damaged, std::string_view also) {
  std::vector<std::string> whole, faults;
  for (auto const& name : checkpoints_in(out_dir)) {
    if (name == damaged) continue;
    if (auto fault = fault_of(out_dir / name); !fault.empty())
      faults.push_back(std::move(fault));
    else
      whole.push_back(name);
  }
  if (!whole.empty())
    return fsdp::formatted(". Whole checkpoints in '{}': {}. --checkpoint={} loads the newest of them{}",
                           out_dir.string(), fsdp::listed(whole), whole.front(), also);
  if (faults.empty()) return fsdp::formatted(". There is no other checkpoint in '{}'", out_dir.string());
  std::string text = ". No other checkpoint there is whole";
  for (auto const& fault : faults) text += "; " + fault;
  return text;
}

void fail_with_others(fs::path const& checkpoint, std::string_view why) {
  auto const folder = checkpoint.has_filename() ? checkpoint : checkpoint.parent_path();
  fsdp::fail<fsdp::ConfigError>("{}{}", why,
                                other_checkpoints(ckpt::folder_of(folder), folder.filename().string(), ""));
}

fs::path named_checkpoint(fs::path const& out_dir, std::string const& name) {
  fs::path folder = name;
  std::error_code error;
  if (name == "best" || name == "latest") {
    auto const pointed = ckpt::read_pointer(out_dir / name);
    if (!pointed) fsdp::fail<fsdp::ConfigError>("setting 'checkpoint': '{}' does not exist", (out_dir / name).string());
    return out_dir / *pointed;
  }
  if (!fs::is_regular_file(folder / ckpt::manifest_name, error)) folder = out_dir / name;
  if (!fs::is_regular_file(folder / ckpt::manifest_name, error))
    fsdp::fail<fsdp::ConfigError>(
        "setting 'checkpoint': expected best, latest or the folder of a checkpoint (one with a file {}), got '{}'",
        ckpt::manifest_name, name);
  return folder;
}

ChosenRun choose_run(Settings const& settings, bool explains) {
  fs::path const out_dir(settings.out_dir);
  expect_folder(out_dir, "out_dir");
  std::string why, damaged;
  try {
    if (!settings.checkpoint.empty()) {
      auto const folder = named_checkpoint(out_dir, settings.checkpoint);
      damaged = folder.filename().string();
      return {read_run(folder), {}};
    }
    damaged = ckpt::read_pointer(out_dir / "latest").value_or("");
    auto found = find_run(out_dir);
    auto const there = checkpoints_in(out_dir);
    if (found) return {std::move(found), {}};
    if (there.empty())
      return {{},
              is_auto(settings) ? fsdp::formatted("note: '{}' has no checkpoint: training starts from {}",
                                                  out_dir.string(), first_start(settings))
                                : std::string()};
    why = fsdp::formatted("'{}' has no file {}", (out_dir / there.front()).string(), ckpt::manifest_name);
  } catch (fsdp::ConfigError const& error) {
    why = error.what();
  }
  if (!is_auto(settings))
    fsdp::fail<fsdp::ConfigError>(
        "{}{}{}", why,
        explains ? other_checkpoints(out_dir, damaged, "; --init_from=auto takes the newest") : std::string(),
        note_on_replaced_run(out_dir));
  std::vector<std::string> faults;
  for (auto const& name : checkpoints_in(out_dir)) {
    try {
      auto run = read_run(out_dir / name);
      return {std::move(run), fsdp::formatted("note: {}; continuing from {}, the newest checkpoint that can be read",
                                              why, (out_dir / name).string())};
    } catch (fsdp::ConfigError const& error) {
      faults.emplace_back(error.what());
    }
  }
  if (std::find(faults.begin(), faults.end(), why) == faults.end()) faults.insert(faults.begin(), why);
  refuse_all(out_dir, faults);
}

}  // namespace transformer
