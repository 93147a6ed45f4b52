// SPDX-License-Identifier: Apache-2.0
// The safetensors format: what is written is read back; what is malformed is refused.
// skip-tsan
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "fsdp/safetensors.hpp"
#include "tests/catch.hpp"
#include "tests/support/messages.hpp"
#include "tests/support/sanitized.hpp"
#include "tests/support/temporary_folder.hpp"

namespace {

using namespace fsdp::checkpoint;
namespace fs = std::filesystem;
using fsdp::testing::has;
using fsdp::testing::what;
using Folder = fsdp::testing::TemporaryFolder;

std::string bytes_of(fs::path const& path) {
  std::ifstream stream(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(stream), {}};
}
void write_bytes(fs::path const& path, std::string const& bytes) { std::ofstream(path, std::ios::binary) << bytes; }

std::string length_prefix(std::uint64_t length) {
  std::string bytes;
  for (int i = 0; i < 8; ++i) bytes += static_cast<char>(static_cast<unsigned char>(length >> (8 * i)));
  return bytes;
}
std::string file_of(std::string const& header, std::size_t data_bytes) {
  return length_prefix(header.size()) + header + std::string(data_bytes, '\0');
}

void write_two(fs::path const& path) {
  SafetensorsWriter writer(
      path, {{"b.weight", fsdp::DType::f32, {2, 3}}, {"a", fsdp::DType::f32, {1}}, {"none", fsdp::DType::f32, {0, 4}}},
      {{"format", "pt"}});
  writer.write<float>("b.weight", std::vector<float>{1, 2, 3, 4, 5, -6.5f});
  writer.write<float>("a", std::vector<float>{7});
  writer.write<float>("none", std::vector<float>{});
  writer.finish();
}

}  // namespace

TEST_CASE("tensors are read back in order, whole and in parts") {
  Folder const folder;
  auto const path = folder.path / "model.safetensors";
  write_two(path);
  CHECK_FALSE(fs::exists(path.string() + ".tmp"));
  SafetensorsFile const file(path);
  REQUIRE(file.entries().size() == 3);
  CHECK(file.entry("b.weight").shape == std::vector<std::int64_t>{2, 3});
  CHECK(file.metadata().at("format") == "pt");
  std::vector<std::int64_t> const shape{2, 3};
  std::vector<float> all(6), part(2);
  file.read("b.weight", shape, 0, all);
  CHECK(all == std::vector<float>{1, 2, 3, 4, 5, -6.5f});
  file.read("b.weight", shape, 3, part);
  CHECK(part == std::vector<float>{4, 5});
  CHECK(file.contains("a"));
  CHECK_FALSE(file.contains("c"));
}

TEST_CASE("the data begin on a multiple of eight bytes and take exactly what the header says") {
  Folder const folder;
  auto const path = folder.path / "model.safetensors";
  write_two(path);
  auto const bytes = bytes_of(path);
  std::uint64_t length = 0;
  for (std::size_t i = 0; i < 8; ++i) length |= std::uint64_t{static_cast<unsigned char>(bytes[i])} << (8 * i);
  CHECK(length % 8 == 0);
  CHECK(bytes[8] == '{');
  CHECK(bytes.size() == 8 + length + 7 * 4);
}

TEST_CASE("BF16 and F16 are read as fp32") {
  Folder const folder;
  auto const path = folder.path / "half.safetensors";
  {
    SafetensorsWriter writer(
        path, {{"b", fsdp::DType::bf16, {2}}, {"h", fsdp::DType::f16, {2}}, {"d", fsdp::DType::f64, {1}}});
    writer.write<fsdp::bf16>("b", std::vector<fsdp::bf16>{fsdp::bf16(1.5f), fsdp::bf16(-2.0f)});
    writer.write<fsdp::fp16>("h", std::vector<fsdp::fp16>{fsdp::fp16(0.25f), fsdp::fp16(100.0f)});
    writer.write<double>("d", std::vector<double>{1});
    writer.finish();
  }
  SafetensorsFile const file(path);
  std::vector<float> out(2);
  std::vector<std::int64_t> const two{2}, one{1};
  file.read("b", two, 0, out);
  CHECK(out == std::vector<float>{1.5f, -2.0f});
  file.read("h", two, 0, out);
  CHECK(out == std::vector<float>{0.25f, 100.0f});
  CHECK(
      has(what([&] { file.read("d", one, 0, std::span(out).first(1)); }), "expected dtype F32, BF16 or F16, got F64"));
  CHECK(has(what([&] { file.read("b", one, 0, std::span(out).first(1)); }), "expected shape (1), got (2)"));
  CHECK(has(what([&] { file.read("c", one, 0, std::span(out).first(1)); }), "no tensor 'c'"));
  CHECK(has(what([&] { file.read("b", two, 1, out); }), "tensor 'b': expected a range of its 2 elements, got 1 to 3"));
}

TEST_CASE("an unfinished or wrong write leaves no file, and the old one stays") {
  Folder const folder;
  auto const path = folder.path / "model.safetensors";
  write_two(path);
  auto const before = bytes_of(path);
  std::vector<float> const one{1};
  {
    SafetensorsWriter writer(path, {{"a", fsdp::DType::f32, {1}}, {"b", fsdp::DType::f32, {1}}});
    CHECK(has(what([&] { writer.write<float>("b", one); }), "expected tensor 'a' next, got 'b'"));
    CHECK(has(what([&] { writer.write<float>("a", std::vector<float>{1, 2}); }), "expected 1 x fp32, got 2 x fp32"));
    writer.write<float>("a", one);
    CHECK(has(what([&] { writer.finish(); }), "1 of 2 tensors"));
  }
  CHECK_FALSE(fs::exists(path.string() + ".tmp"));
  CHECK(bytes_of(path) == before);
  CHECK(has(what([&] { SafetensorsWriter(folder.path / "no" / "folder", {}); }), "cannot be created"));
  CHECK(has(what([&] {
              SafetensorsWriter(path, {{"a", fsdp::DType::f32, {1}}, {"a", fsdp::DType::f32, {1}}});
            }),
            "occurs twice"));
}

TEST_CASE("malformed files are refused with the file's name and the reason") {
  struct Case {
    std::string name, bytes, reason;
  };
  std::string const tensor = R"("dtype":"F32","shape":[2],"data_offsets":[0,8])";
  std::vector<Case> const cases{
      {"empty", "", "too few"},
      {"seven bytes", "1234567", "too few"},
      {"header longer than the file", length_prefix(1000) + "{}", "does not fit"},
      {"header of 2^63", length_prefix(std::uint64_t{1} << 63) + "{}", "does not fit"},
      {"header above the limit", length_prefix(100'000'001) + "{}", "does not fit"},
      {"empty header", file_of("", 0), "does not begin with '{'"},
      {"header with leading blanks", file_of(" {}", 0), "does not begin with '{'"},
      {"no JSON", file_of("{nonsense", 0), "not a JSON object"},
      {"JSON cut off", file_of("{\"a\":{" + tensor, 8), "not a JSON object"},
      {"a NUL behind the JSON", file_of(std::string("{}\0garbage", 10), 0), "bytes behind the end of its JSON object"},
      {"a NUL inside the JSON", file_of(std::string("{\"a\":\0", 6), 0), "not a JSON object"},
      {"a second object", file_of("{}{}", 0), "has bytes behind the end of its JSON object, the first at offset 2"},
      {"tensor is no object", file_of("{\"a\":1}", 0), "expected 'dtype'"},
      {"no offsets", file_of(R"({"a":{"dtype":"F32","shape":[2]}})", 8), "expected 'dtype'"},
      {"unknown dtype", file_of(R"({"a":{"dtype":"Q4","shape":[2],"data_offsets":[0,8]}})", 8), "got Q4"},
      {"dtype is a number", file_of(R"({"a":{"dtype":4,"shape":[2],"data_offsets":[0,8]}})", 8), "got 4"},
      {"negative extent", file_of(R"({"a":{"dtype":"F32","shape":[-2],"data_offsets":[0,8]}})", 8), "extent -2"},
      {"fractional extent", file_of(R"({"a":{"dtype":"F32","shape":[2.5],"data_offsets":[0,8]}})", 8), "extent 2.5"},
      {"overflowing shape",
       file_of(R"({"a":{"dtype":"F32","shape":[4294967296,4294967296,4],"data_offsets":[0,8]}})", 8), "too large"},
      {"wrong size", file_of(R"({"a":{"dtype":"F32","shape":[3],"data_offsets":[0,8]}})", 8),
       "do not match its 8 bytes of data"},
      {"out of range", file_of("{\"a\":{" + tensor + "}}", 4), "outside the 4 bytes"},
      {"backwards", file_of(R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[8,0]}})", 8), "outside"},
      {"negative offset", file_of(R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[-8,0]}})", 8),
       "two 'data_offsets'"},
      {"three offsets", file_of(R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,4,8]}})", 8),
       "two 'data_offsets'"},
      {"overlap",
       file_of(
           R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"b":{"dtype":"F32","shape":[2],"data_offsets":[4,12]}})",
           12),
       "an overlap"},
      {"same bytes twice", file_of("{\"a\":{" + tensor + "},\"b\":{" + tensor + "}}", 8), "an overlap"},
      {"gap", file_of(R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}})", 8), "a gap"},
      {"bytes left over", file_of("{\"a\":{" + tensor + "}}", 12), "take 8 bytes, but its data have 12"},
      {"name twice", file_of("{\"a\":{" + tensor + "},\"a\":{" + tensor + "}}", 8), "'a' occurs twice"},
      {"metadata is no object", file_of(R"({"__metadata__":3})", 0), "__metadata__"},
      {"metadata value is no text", file_of(R"({"__metadata__":{"a":3}})", 0), "expected a text"},
  };
  Folder const folder;
  auto const path = folder.path / "bad.safetensors";
  for (auto const& bad : cases) {
    INFO(bad.name);
    write_bytes(path, bad.bytes);
    auto const message = what([&] { SafetensorsFile file(path); });
    INFO(message);
    CHECK(has(message, "bad.safetensors"));
    CHECK(has(message, bad.reason));
  }
  CHECK(has(what([&] { SafetensorsFile file(folder.path / "none"); }), "cannot be opened"));
  CHECK(has(what([&] { SafetensorsFile file(folder.path); }), "directory"));
}

TEST_CASE("a header with many names takes time in proportion to them") {
  // If each name is compared with all before it, this takes longer than a test may.
  constexpr std::size_t names = fsdp::testing::sanitized ? 5'000 : 120'000;
  std::vector<fsdp::checkpoint::TensorEntry> entries(names);
  for (std::size_t i = 0; i < names; ++i)
    entries[i] = {"layers." + std::to_string(i) + ".weight", fsdp::DType::f32, {0}};
  Folder const folder;
  auto const path = folder.path / "many.safetensors";
  write_bytes(path, fsdp::checkpoint::safetensors_header(entries, {}, "many"));
  CHECK(SafetensorsFile(path).entries().size() == names);
}

TEST_CASE("a file cut at any byte, or with any header byte changed, never reads outside itself") {
  Folder const folder;
  auto const path = folder.path / "model.safetensors";
  write_two(path);
  auto const whole = bytes_of(path);
  for (std::size_t length = 0; length < whole.size(); ++length) {
    write_bytes(path, whole.substr(0, length));
    REQUIRE_THROWS_AS(SafetensorsFile(path), fsdp::ConfigError);
  }
  auto const data_bytes = std::size_t{7 * 4};
  for (std::size_t at = 0; at < whole.size() - data_bytes; ++at)
    for (char const byte : {'\0', '0', '9', '"', '}', '\xff'}) {
      auto changed = whole;
      changed[at] = byte;
      write_bytes(path, changed);
      try {
        SafetensorsFile const file(path);
        for (auto const& entry : file.entries()) {
          if (entry.dtype == fsdp::DType::f64 || entry.dtype == fsdp::DType::i64) continue;
          std::vector<float> values(static_cast<std::size_t>(entry.numel()));
          file.read(entry.name, entry.shape, 0, values);
        }
      } catch (fsdp::Error const&) {
      }
    }
}
