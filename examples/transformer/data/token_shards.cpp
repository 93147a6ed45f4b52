// SPDX-License-Identifier: Apache-2.0
// The token files of a split: one, or several shards.
#include "transformer/data/token_shards.hpp"

#include <glob.h>

#include <algorithm>
#include <numeric>
#include <system_error>

#include "fsdp/error.hpp"
#include "transformer/data/input_file.hpp"
#include "transformer/launch/program.hpp"

namespace transformer {
namespace {

namespace fs = std::filesystem;

std::vector<fs::path> files_of_folder(fs::path const& folder, Split split) {
  auto const one = folder / (std::string(name(split)) + ".bin");
  std::error_code error;
  if (fs::exists(one, error)) return {one};
  std::vector<fs::path> shards;
  for (auto at = fs::directory_iterator(folder, error); !error && at != fs::end(at); at.increment(error)) {
    auto const stem = at->path().stem().string();
    if (at->path().extension() == ".bin" && stem.find(name(split)) != std::string::npos) shards.push_back(at->path());
  }
  if (shards.empty()) return {one};  // opening it says that it is missing
  return shards;
}

std::vector<fs::path> files_of_pattern(std::string const& pattern) {
  glob_t found{};
  std::vector<fs::path> files;
  if (::glob(pattern.c_str(), 0, nullptr, &found) == 0) files.assign(found.gl_pathv, found.gl_pathv + found.gl_pathc);
  ::globfree(&found);
  return files;
}

}  // namespace

std::vector<fs::path> find_token_files(std::string const& text, Split split) {
  std::error_code error;
  std::vector<fs::path> files;
  if (fs::is_directory(text, error)) {
    files = files_of_folder(text, split);
  } else if (text.find_first_of("*?[") == std::string::npos || fs::exists(text, error)) {
    files = {text};
  } else {
    files = files_of_pattern(text);
    if (files.empty())
      fsdp::fail<fsdp::ConfigError>("setting '{}_data': expected token files, but no file matches '{}'", name(split),
                                    text);
  }
  for (auto const& file : files)
    if (form_by_name(file))
      fsdp::fail<fsdp::ConfigError>(
          "setting '{}_data': expected token files, but '{}' is a text by its name; make tokens of it with: {} prepare "
          "--dataset=NAME --data={}",
          name(split), file.string(), program_name, file.string());
  std::sort(files.begin(), files.end());
  return files;
}

TokenShards::TokenShards(std::vector<fs::path> const& paths, std::size_t token_bytes) {
  for (auto const& path : paths) sizes_.push_back(files_.emplace_back(path, token_bytes).size());
}

std::int64_t TokenShards::size() const { return std::accumulate(sizes_.begin(), sizes_.end(), std::int64_t{0}); }

}  // namespace transformer
