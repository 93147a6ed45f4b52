// SPDX-License-Identifier: Apache-2.0
// A folder that lives as long as a test case.
#pragma once

#include <stdlib.h>

#include <filesystem>
#include <fstream>
#include <string>
#include <system_error>

#include "tests/catch.hpp"

namespace fsdp::testing {

struct TemporaryFolder {
  std::filesystem::path path;

  TemporaryFolder() {
    auto name = (std::filesystem::temp_directory_path() / "fsdp_test_XXXXXX").string();
    REQUIRE(::mkdtemp(name.data()) != nullptr);
    path = name;
  }
  TemporaryFolder(TemporaryFolder const&) = delete;
  TemporaryFolder& operator=(TemporaryFolder const&) = delete;
  ~TemporaryFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path, ignored);
  }

  /// Writes a file into the folder. @return its path
  std::filesystem::path file(std::string const& name, std::string const& bytes) const {
    std::ofstream(path / name, std::ios::binary) << bytes;
    return path / name;
  }
};

}  // namespace fsdp::testing
