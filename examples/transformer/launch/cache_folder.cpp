// SPDX-License-Identifier: Apache-2.0
// A folder of cached results.
#include "transformer/launch/cache_folder.hpp"
#include "transformer/launch/program.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <string>
#include <system_error>

#include "fsdp/files.hpp"
#include "fsdp/json.hpp"

namespace transformer {

namespace fs = std::filesystem;

std::optional<fs::path> cache_folder() {
  auto const named = [](char const* variable) -> fs::path {
    char const* const text = std::getenv(variable);
    fs::path const path = text == nullptr ? "" : text;
    return path.is_absolute() ? path : fs::path();  // the specification ignores others
  };
  if (auto const cache = named("XDG_CACHE_HOME"); !cache.empty()) return cache / program_name;
  if (auto const home = named("HOME"); !home.empty()) return home / ".cache" / program_name;
  return std::nullopt;
}

nlohmann::json read_answers(fs::path const& file) noexcept {
  auto const nothing = nlohmann::json::object();
  try {
    std::error_code error;
    if (!fs::is_regular_file(file, error)) return nothing;
    std::ifstream stream(file, std::ios::binary);
    std::string const text{std::istreambuf_iterator<char>(stream), {}};
    auto read = fsdp::checkpoint::parse_json<nlohmann::json>(text);
    return read.is_object() ? read : nothing;
  } catch (...) {
    return nothing;
  }
}

bool write_answers(fs::path const& file, nlohmann::json const& answers) noexcept {
  static std::atomic<int> count{0};
  try {
    std::error_code error;
    fs::create_directories(file.parent_path(), error);
    auto const temporary = fs::path(file) += fmt::format(".{}.{}", ::getpid(), count++);
    fsdp::checkpoint::write_beside(file, temporary, answers.dump(1) + "\n");
    return true;
  } catch (...) {
    return false;
  }
}

}  // namespace transformer
