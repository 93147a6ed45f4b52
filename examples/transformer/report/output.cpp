// SPDX-License-Identifier: Apache-2.0
#include "transformer/report/output.hpp"

#include <cerrno>
#include <cstdio>
#include <string>
#include <system_error>

#include "fsdp/error.hpp"
#include "transformer/data/new_file.hpp"

namespace transformer::report {
namespace {

template <class Error>
[[noreturn]] void cannot_write(std::filesystem::path const& path, int why) {
  fsdp::fail<Error>("'{}' cannot be written: {}", path.string(), std::generic_category().message(why));
}

void write_in_place(std::filesystem::path const& path, std::string_view text) {
  auto* const file = std::fopen(path.c_str(), "wb");
  if (file == nullptr) cannot_write<fsdp::ConfigError>(path, errno);
  bool const taken = std::fwrite(text.data(), 1, text.size(), file) == text.size() && std::fflush(file) == 0;
  int const why = errno;
  bool const closed = std::fclose(file) == 0;
  if (!taken || !closed) cannot_write<fsdp::ResourceError>(path, taken ? errno : why);
}

/// Whether a new file may take the name: nothing has it, or a plain file.
bool is_replaceable(std::filesystem::path const& path) {
  std::error_code ignored;  // NewFile says what is wrong with a name that cannot be looked up
  auto const type = std::filesystem::symlink_status(path, ignored).type();
  return type == std::filesystem::file_type::regular || type == std::filesystem::file_type::not_found ||
         type == std::filesystem::file_type::none;
}

}  // namespace

void write_output(std::filesystem::path const& path, std::string_view text) {
  if (is_replaceable(path)) return replace_file(path, text);
  write_in_place(path, text);
}

void replace_file(std::filesystem::path const& path, std::string_view text) {
  NewFile file(path);
  file.write(text);
  file.commit();
}

}  // namespace transformer::report
