// SPDX-License-Identifier: Apache-2.0
// Any bytes, and a good text with changes, as the header of a safetensors file whose length is right: refused by name,
// or tensors that lie in the file.
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "fsdp/error.hpp"
#include "fsdp/safetensors.hpp"
#include "tests/fuzz/targets/changed.hpp"

namespace safetensors_headers {

constexpr std::size_t data_bytes = 32;

void read(std::string const& text) {
  static auto const path = std::filesystem::path("/dev/shm") / ("fsdp-fuzz-header-" + std::to_string(::getpid()));
  std::string length;
  for (int i = 0; i < 8; ++i) length += static_cast<char>(static_cast<unsigned char>(text.size() >> (8 * i)));
  std::ofstream(path, std::ios::binary) << length << text << std::string(data_bytes, 'x');
  try {
    fsdp::checkpoint::SafetensorsFile const file(path);
    std::vector<float> values;
    std::size_t bytes = 0;
    for (auto const& entry : file.entries()) {
      bytes += static_cast<std::size_t>(entry.numel()) * fsdp::size_of(entry.dtype);
      if (entry.dtype == fsdp::DType::f64 || entry.dtype == fsdp::DType::i64) continue;
      values.resize(static_cast<std::size_t>(entry.numel()));
      file.read(entry.name, entry.shape, 0, values);
    }
    if (bytes > data_bytes || (file.other_types().empty() && bytes != data_bytes)) std::abort();
  } catch (fsdp::ConfigError const&) {
  }
  std::filesystem::remove(path);
}

}  // namespace safetensors_headers

extern "C" int LLVMFuzzerTestOneInput(std::uint8_t const* data, std::size_t size) {
  static auto const good =
      fsdp::checkpoint::safetensors_header(
          {{"a", fsdp::DType::f32, {2, 3}}, {"b", fsdp::DType::bf16, {4}}, {"c", fsdp::DType::f16, {0}}},
          {{"format", "pt"}}, "x")
          .substr(8);
  if (size == 0) return 0;
  std::string const rest(reinterpret_cast<char const*>(data) + 1, size - 1);
  safetensors_headers::read(data[0] % 2 == 0 ? rest : fsdp::testing::changed(good, rest));
  return 0;
}
