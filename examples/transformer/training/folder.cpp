// SPDX-License-Identifier: Apache-2.0
// The folder of a run: checks before writing, the run that it holds, and its replacement.
#include "transformer/training/folder.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <fstream>
#include <random>
#include <system_error>
#include <vector>

#include "fsdp/checkpoint.hpp"
#include "fsdp/error.hpp"
#include "fsdp/files.hpp"
#include "transformer/data/dataset.hpp"
#include "transformer/launch/machine.hpp"
#include "transformer/launch/program.hpp"
#include "transformer/report/log_lines.hpp"

namespace transformer {
namespace {

namespace fs = std::filesystem;
namespace ckpt = fsdp::checkpoint;

constexpr std::string_view replaced_name = "replaced-run", partial_name = ".replaced-run.partial",
                           removed_name = ".replaced-run.removed";

bool is_there(fs::path const& path) {
  std::error_code error;
  return fs::exists(path, error);
}

/// Whether this program wrote the folder: a run, or an export in the program's own format.
bool is_own(fs::path const& folder) {
  if (is_there(folder / log_file_name) || !ckpt::CheckpointList(folder).checkpoints.empty()) return true;
  try {
    auto const config = folder / "config.json";
    return is_there(config) && is_own_config(config);
  } catch (fsdp::ConfigError const&) {  // nobody's
    return false;
  }
}

/// Files of a run in its folder, beside files_of_a_model, its log and its checkpoints.
constexpr std::array<std::string_view, 5> other_names_of_a_run{"latest", "best", adapters_name, "encoder.json",
                                                               "vocab.bpe"};

/// Names of files that belong to a run in its folder, beside its log and its checkpoints.
template <class Use>
void each_name_of_a_run(Use const& use) {
  for (auto const name : other_names_of_a_run) use(name);
  for (auto const name : files_of_a_model) use(name);
}

constexpr std::array<std::string_view, 3> names_of_weights{weights_name, "model.safetensors.index.json",
                                                           "adapter_model.safetensors"};

/// Whether the folder has what set_run_aside() has moved there.
bool is_set_aside(fs::path const& folder) {
  std::error_code error;
  if (!fs::is_directory(folder, error)) return false;
  bool found = false;
  each_name_of_a_run([&](std::string_view name) { found = found || is_there(folder / name); });
  return found || !ckpt::CheckpointList(folder).checkpoints.empty();
}

}  // namespace

bool is_part_of_weights(std::string_view name) { return name.starts_with("model-") && name.ends_with(".safetensors"); }

void prepare_out_dir(fs::path const& folder) {
  std::error_code error;
  fs::create_directories(folder, error);
  if (error)
    fsdp::fail<fsdp::ConfigError>("setting 'out_dir': '{}' cannot be made: {}", folder.string(), error.message());
  auto const probe = folder / fmt::format(".probe.{}", ::getpid());
  int why = 0;
  {
    auto const file = ckpt::detail::new_file(probe, 0600);
    if (file < 0) why = errno;
    fs::remove(probe, error);  // a process that is killed from here on leaves no file
    constexpr std::string_view text = "probe\n";
    errno = ENOSPC;
    if (why == 0 && ::write(file, text.data(), text.size()) != static_cast<ssize_t>(text.size())) why = errno;
  }
  if (why != 0)
    fsdp::fail<fsdp::ConfigError>("setting 'out_dir': no file can be written to '{}': {}", folder.string(),
                                  std::generic_category().message(why));
}

FolderMark::FolderMark(fs::path const& folder)
    : file_(folder / fmt::format(".mark.{}.{}.{:x}", host_name(), ::getpid(), std::random_device{}())) {
  errno = 0;
  if (!(std::ofstream(file_) << "shared\n" << std::flush))
    fsdp::fail<fsdp::ConfigError>("setting 'out_dir': no file can be written to '{}': {}", folder.string(),
                                  std::generic_category().message(errno));
}
FolderMark::~FolderMark() {
  std::error_code error;
  fs::remove(file_, error);
}
std::string FolderMark::text() const { return file_.filename().string() + " " + host_name(); }

void expect_mark(fs::path const& out_dir, std::string_view mark, int rank) {
  auto const name = mark.substr(0, mark.find(' '));
  if (is_there(out_dir / name)) return;
  fsdp::fail<fsdp::ConfigError>(
      "setting 'out_dir': rank {} on {} does not see in '{}' what rank 0 on {} writes there, but every rank saves its "
      "part of a checkpoint; name a folder that all machines share (NFS, Lustre), by its absolute path",
      rank, host_name(), fs::absolute(out_dir).string(), mark.substr(name.size() + 1));
}

void expect_folder(fs::path const& folder, std::string_view setting) {
  std::error_code error;
  if (!is_there(folder)) return;
  if (!fs::is_directory(folder, error))
    fsdp::fail<fsdp::ConfigError>("setting '{}': expected a folder, but '{}' is a file", setting, folder.string());
  if (auto const partial = folder / partial_name; is_there(partial))
    fsdp::fail<fsdp::ConfigError>(
        "setting '{}': '{}' has a part of the run in '{}', because a start with --overwrite was killed while it moved "
        "that run; move the files back first: mv {}/* {}/",
        setting, partial.string(), folder.string(), partial.string(), folder.string());
  if (is_there(folder / ckpt::manifest_name)) {
    auto const checkpoint = folder.has_filename() ? folder : folder.parent_path();
    fsdp::fail<fsdp::ConfigError>("setting '{}': '{}' is a checkpoint; the folder of its run is '{}'", setting,
                                  checkpoint.string(), ckpt::folder_of(checkpoint).string());
  }
}

void expect_folder_for_models(fs::path const& folder, std::string_view setting) {
  expect_folder(folder, setting);
  for (auto const* const tokens : {"train.bin", "val.bin"})
    if (is_there(folder / tokens))
      fsdp::fail<fsdp::ConfigError>(
          "setting '{}': '{}' is the folder of a data set (it has a file {}), whose {} would be replaced; choose "
          "another folder",
          setting, folder.string(), tokens, meta_name);
}

void expect_folder_for_runs(fs::path const& out_dir) {
  expect_folder_for_models(out_dir, "out_dir");
  if (!is_there(out_dir) || is_own(out_dir)) return;
  for (auto const name : files_of_a_model)
    if (is_there(out_dir / name))
      fsdp::fail<fsdp::ConfigError>(
          "setting 'out_dir': '{}' has a file {} that {} train has not written, and a run might replace it; "
          "choose another folder",
          out_dir.string(), name, program_name);
}

void expect_folder_for_export(Settings const& settings) {
  fs::path const to(settings.to);
  std::error_code error;
  if (fs::equivalent(to, settings.out_dir, error))
    fsdp::fail<fsdp::ConfigError>("setting 'to': expected a folder other than out_dir, got '{}'", settings.out_dir);
  for (auto const* const name : {"latest", "log.jsonl"})
    if (fs::exists(to / name, error))
      fsdp::fail<fsdp::ConfigError>(
          "setting 'to': '{}' is the out_dir of a run, whose model would be overwritten; name another folder",
          to.string());
  expect_folder_for_models(to, "to");
  for (auto const name : files_of_a_model)
    if (!settings.overwrite && fs::exists(to / name, error)) refuse_existing(to, name);
}

void refuse_existing(fs::path const& to, std::string_view name) {
  fsdp::fail<fsdp::ConfigError>(
      "setting 'to': '{}' has a file {} already; name another folder, or give --overwrite to replace the model there",
      to.string(), name);
}

std::optional<RunState> find_run(fs::path const& out_dir) {
  auto const pointer = out_dir / "latest";
  if (auto const name = ckpt::read_pointer(pointer)) return read_run(out_dir / *name);
  std::error_code error;
  if (!fs::is_directory(out_dir, error)) return std::nullopt;
  std::vector<std::string> there;
  for (auto const& checkpoint : ckpt::CheckpointList(out_dir).checkpoints) there.push_back(checkpoint.text());
  if (there.empty()) return std::nullopt;
  // A run that is killed between its first checkpoint and the pointer to it leaves one, which is whole.
  if (there.size() == 1) return read_run(out_dir / there.front());
  fsdp::fail<fsdp::ConfigError>("'{}', which names the checkpoint to resume from, is missing", pointer.string());
}

std::string run_in(fs::path const& out_dir) {
  std::error_code error;
  if (!fs::is_directory(out_dir, error)) return {};
  auto const checkpoints = ckpt::CheckpointList(out_dir).checkpoints;
  if (!checkpoints.empty())
    return fsdp::formatted("{} checkpoint{}, the newest {}", checkpoints.size(), checkpoints.size() == 1 ? "" : "s",
                           checkpoints.back().text());
  for (auto const name : names_of_weights)
    if (is_there(out_dir / name)) return std::string(name);
  return {};
}

void expect_replaceable(fs::path const& out_dir) {
  auto const folder = out_dir / replaced_name;
  if (is_there(folder) && !is_set_aside(folder))
    fsdp::fail<fsdp::ConfigError>("setting 'overwrite': '{}' is not of {}; give it another name", folder.string(),
                                  program_name);
  if (is_there(folder) && !ckpt::CheckpointList(out_dir).checkpoints.empty())
    fsdp::fail<fsdp::ConfigError>(
        "setting 'overwrite': '{}' still has the run that an interrupted start with --overwrite was to replace; move "
        "that folder elsewhere, or remove it",
        folder.string());
}

void set_run_aside(fs::path const& out_dir) {
  ckpt::FileLock const lock(out_dir / ".lock");
  if (is_there(out_dir / replaced_name)) return;
  ckpt::remove_folder(out_dir / removed_name);  // of a process that was killed
  std::vector<std::string> names;
  std::error_code error;
  each_name_of_a_run([&](std::string_view name) {
    if (fs::is_regular_file(out_dir / name, error)) names.emplace_back(name);
  });
  for (auto const& entry : fs::directory_iterator(out_dir, error))
    if (is_part_of_weights(entry.path().filename().string())) names.push_back(entry.path().filename().string());
  for (auto const& checkpoint : ckpt::CheckpointList(out_dir).checkpoints) names.push_back(checkpoint.text());
  auto const partial = out_dir / partial_name;
  if (names.empty()) return;
  ckpt::make_folder(partial);
  for (auto const& name : names) ckpt::rename(out_dir / name, partial / name);
  ckpt::sync_folder(partial);
  ckpt::rename_durably(partial, out_dir / replaced_name);
}

void remove_replaced_run(fs::path const& out_dir) {
  auto const folder = out_dir / replaced_name, hidden = out_dir / removed_name;
  if (!is_set_aside(folder)) return;
  ckpt::remove_folder(hidden);
  ckpt::rename_durably(folder, hidden);  // never half of a run under its name
  ckpt::remove_folder(hidden);
}

fs::path replaced_run_in(fs::path const& out_dir) {
  auto const folder = out_dir / replaced_name;
  return is_set_aside(folder) ? folder : fs::path();
}

std::string note_on_replaced_run(fs::path const& out_dir) {
  auto const folder = replaced_run_in(out_dir);
  if (folder.empty()) return {};
  return fsdp::formatted(
      "; '{}' has the run that a start with --overwrite was to replace: to continue that run, move its files to '{}'; "
      "to replace it, start with --overwrite",
      folder.string(), out_dir.string());
}

}  // namespace transformer
