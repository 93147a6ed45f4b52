// SPDX-License-Identifier: Apache-2.0
// Hardware files of `nanogpt plan`, from measurements.
#pragma once

#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "fsdp/error.hpp"
#include "fsdp/plan.hpp"

namespace bench {

/// Writes values to a hardware file, and keeps its other lines.
/// @throws fsdp::ResourceError if the file cannot be written
inline void write_hardware(std::string const& path, std::vector<fsdp::plan::HardwareValue> const& values) {
  std::string text;
  if (std::ifstream before(path); before) text.assign(std::istreambuf_iterator<char>(before), {});
  std::ofstream file(path);
  file << fsdp::plan::with_values(text, values);
  file.close();
  if (!file) fsdp::fail<fsdp::ResourceError>("cannot write '{}'", path);
}

}  // namespace bench
