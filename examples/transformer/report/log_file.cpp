// SPDX-License-Identifier: Apache-2.0
#include "transformer/report/log_file.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <exception>
#include <system_error>
#include <utility>

#include "fsdp/error.hpp"
#include "transformer/launch/program.hpp"

namespace transformer {
namespace {

/// Whether a file that is not empty ends within a line.
bool ends_in_a_line(int file) {
  struct stat info {};
  char last = '\n';
  return ::fstat(file, &info) == 0 && info.st_size > 0 && ::pread(file, &last, 1, info.st_size - 1) == 1 &&
         last != '\n';
}

}  // namespace

LogFile::LogFile(std::filesystem::path const& file) : name_(file.string()) {
  file_ = ::open(name_.c_str(), O_RDWR | O_APPEND | O_CREAT | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK, 0666);
  int const error = errno;
  struct stat info {};
  if (file_ >= 0 && ::fstat(file_, &info) == 0 && S_ISREG(info.st_mode)) {
    torn_ = ends_in_a_line(file_);
    return;
  }
  if (file_ < 0 && error != ELOOP)
    fsdp::fail<fsdp::ConfigError>("'{}' cannot be written: {}", name_, std::generic_category().message(error));
  if (file_ >= 0) ::close(file_);
  fsdp::fail<fsdp::ConfigError>(
      "'{}' cannot be written: it is a link, a pipe or a device, and the log of a run is a file; move it away", name_);
}

LogFile::~LogFile() {
  if (file_ >= 0) ::close(file_);
}

void LogFile::write(std::string_view object) noexcept {
  if (file_ < 0) return;
  try {
    if (append(fmt::format("{}{}\n", torn_ ? "\n" : "", object)) || std::exchange(warned_, true)) return;
    auto const text =
        fmt::format("{}: warning: '{}' cannot be written: {}; training goes on, but lines are missing in this file\n",
                    program_name, name_, std::generic_category().message(errno));
    std::fwrite(text.data(), 1, text.size(), stderr);
  } catch (std::exception const&) {  // no memory for a line: it is missing too
  }
}

/// @return whether all of it was written; else errno says why
bool LogFile::append(std::string_view text) noexcept {
  while (!text.empty()) {
    auto const written = ::write(file_, text.data(), text.size());
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) return false;
    text.remove_prefix(static_cast<std::size_t>(written));
    torn_ = !text.empty();
  }
  return true;
}

}  // namespace transformer
