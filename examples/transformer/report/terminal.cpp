// SPDX-License-Identifier: Apache-2.0
#include "transformer/report/terminal.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <fstream>
#include <string>
#include <string_view>

namespace transformer {
namespace {

constexpr int usual_columns = 80;

/// 0 if the file is no terminal.
int columns_of(int file) {
  if (::isatty(file) != 1) return 0;
  ::winsize size{};
  return ::ioctl(file, TIOCGWINSZ, &size) == 0 && size.ws_col > 0 ? size.ws_col : usual_columns;
}

struct Process {
  std::string name;
  int parent = 0;  ///< 0: there is none, or the system does not tell
};

Process process(int id) {
  Process found;
  std::ifstream stream(fmt::format("/proc/{}/status", id));
  for (std::string text; std::getline(stream, text);) {
    if (text.starts_with("Name:\t")) found.name = text.substr(6);
    if (text.starts_with("PPid:\t")) found.parent = std::atoi(text.c_str() + 6);
  }
  return found;
}

/// The process that has started this rank on this machine; 0: there is none.
int launcher() {
  constexpr std::array<std::string_view, 5> names{"mpirun", "mpiexec", "orterun", "prterun", "mpiexec.hydra"};
  int id = ::getppid();
  for (int steps = 0; id > 1 && steps < 16; ++steps) {
    auto const found = process(id);
    if (std::find(names.begin(), names.end(), found.name) != names.end()) return id;
    id = found.parent;
  }
  return 0;
}

bool is_launched() {
  for (char const* const name : {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMIX_RANK"})
    if (std::getenv(name) != nullptr) return true;
  return false;
}

}  // namespace

int terminal_columns() {
  if (char const* const wish = std::getenv("NANOGPT_PROGRESS"); wish != nullptr)
    return std::string_view(wish) == "1" ? std::max(columns_of(STDOUT_FILENO), usual_columns) : 0;
  if (!is_launched()) return columns_of(STDOUT_FILENO);
  int const id = launcher();
  if (id == 0) return 0;
  auto const output = fmt::format("/proc/{}/fd/1", id);
  struct stat info {};
  if (::stat(output.c_str(), &info) != 0 || !S_ISCHR(info.st_mode)) return 0;  // a pipe is better not opened again
  int const file = ::open(output.c_str(), O_WRONLY | O_NOCTTY | O_NONBLOCK | O_CLOEXEC);
  if (file < 0) return 0;
  int const columns = columns_of(file);
  ::close(file);
  return columns;
}

}  // namespace transformer
