// SPDX-License-Identifier: Apache-2.0
#include "sampled_model.hpp"

#include <fmt/format.h>

#include <system_error>

#include "fsdp/checkpoint/checkpoint_folder.hpp"
#include "fsdp/checkpoint/manifest.hpp"
#include "fsdp/error.hpp"
#include "run_state.hpp"
#include "saved_model.hpp"

namespace nanogpt {
namespace {

namespace fs = std::filesystem;
using fsdp::checkpoint::manifest_name;

bool is_file(fs::path const& path) {
  std::error_code error;
  return fs::is_regular_file(path, error);
}

/// The folder of the checkpoint that the setting names: a pointer of out_dir, a folder, or one in out_dir.
fs::path named_checkpoint(Settings const& settings) {
  fs::path const out_dir(settings.out_dir), name(settings.checkpoint);
  if (settings.checkpoint == "best" || settings.checkpoint == "latest") {
    if (auto const found = fsdp::checkpoint::read_pointer(out_dir / name)) return out_dir / *found;
    fsdp::fail<fsdp::ConfigError>("setting 'checkpoint': there is no '{}': no checkpoint of '{}' is called so",
                                  (out_dir / name).string(), settings.out_dir);
  }
  for (auto const& folder : {name, out_dir / name})
    if (is_file(folder / manifest_name)) return folder;
  fsdp::fail<fsdp::ConfigError>(
      "setting 'checkpoint': expected best, latest or the folder of a checkpoint (one with a file {}), got '{}'",
      manifest_name, settings.checkpoint);
}

/// Training keeps what its tokens are beside the checkpoints.
SampledModel from_checkpoint(fs::path const& folder) {
  SampledModel model;
  model.checkpoint = folder;
  model.config = read_run(folder).model;
  model.config.validate();
  auto const beside = fs::absolute(folder / "..").lexically_normal();
  if (auto const meta = beside / meta_name; is_file(meta)) model.meta = read_vocabulary(meta, model.config, folder);
  return model;
}

}  // namespace

SampledModel open_sampled_model(Settings const& settings) {
  if (!settings.checkpoint.empty()) return from_checkpoint(named_checkpoint(settings));
  fs::path const out_dir(settings.out_dir);
  if (!is_file(out_dir / weights_name)) {
    if (auto const latest = fsdp::checkpoint::read_pointer(out_dir / "latest")) {
      auto model = from_checkpoint(out_dir / *latest);
      model.note = fmt::format("there is no '{}': sampling from the latest checkpoint, '{}'",
                               (out_dir / weights_name).string(), model.checkpoint.string());
      return model;
    }
  }
  auto const saved = open_saved_model(out_dir);
  return {saved.config, saved.meta, saved.weights, {}, {}};
}

}  // namespace nanogpt
