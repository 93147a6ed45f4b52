// SPDX-License-Identifier: Apache-2.0
// skip-tsan
// Texts of messages: what fmt would say, cut to the room that there is.
#include "fsdp/detail/base/format.hpp"

#include <fmt/format.h>

#include <array>
#include <cstdint>
#include <limits>
#include <string>
#include <string_view>

#include "fsdp/error.hpp"
#include "tests/catch.hpp"

using fsdp::formatted;

TEST_CASE("Fields are replaced by arguments of all kinds", "[format]") {
  std::string const text = "text";
  std::string_view const view = "view";
  std::size_t const size = std::numeric_limits<std::size_t>::max();
  std::int64_t const lowest = std::numeric_limits<std::int64_t>::min();
  CHECK(formatted("") == "");
  CHECK(formatted("no field") == "no field");
  CHECK(formatted("{}", "literal") == "literal");
  CHECK(formatted("{} {} {}|", text, view, "literal") == "text view literal|");
  CHECK(formatted("{}{:>3}", 'a', 'b') == "a  b");
  CHECK(formatted("{}{}{}", true, -1, 2u) == "true-12");
  CHECK(formatted("{} {} {}", size, lowest, std::uint8_t{255}) == fmt::format("{} {} {}", size, lowest, 255));
  CHECK(formatted("{} {} {}", 0.1f, 0.1, 1e300) == "0.1 0.1 1e+300");
  CHECK(formatted("{}", static_cast<char const*>(nullptr)) == "(null)");
  CHECK(formatted("{{}} {{{}}} }}{{", 7) == "{} {7} }{");
}

TEST_CASE("Specifications are fmt's", "[format]") {
  CHECK(formatted("{:.3f}|{:g}|{:e}", 2.0 / 3.0, 1e-9f, 12.5) ==
        fmt::format("{:.3f}|{:g}|{:e}", 2.0 / 3.0, 1e-9f, 12.5));
  CHECK(formatted("{:x}|{:04x}|{:X}|{:>6}|{:<6}|{:03}", 255u, 10u, 255u, 42, 42, 7) == "ff|000a|FF|    42|42    |007");
  CHECK(formatted("{:>6}|{:<6}|{:^6}|", "text", "text", "text") == "  text|text  | text |");
  std::size_t const width = 9;
  CHECK(formatted("{:<{}}|{:>{}}|{}", "text", width, 1.5, 5, 3) == "text     |  1.5|3");
  CHECK(formatted("{:*^7}|{:s}|{:d}|{:08.3f}", 42, "text", 7, -1.5) ==
        fmt::format("{:*^7}|{:s}|{:d}|{:08.3f}", 42, "text", 7, -1.5));
  CHECK(formatted("{:x}", -255) == fmt::format("{:x}", -255));
}

TEST_CASE("A text of any length is whole", "[format]") {
  for (std::size_t const length : {255u, 256u, 257u, 10'000u}) {
    std::string const text(length, 'x');
    CHECK(formatted("{}", text) == text);
    CHECK(formatted("{}{}{}", text, 1, text) == text + "1" + text);
  }
}

TEST_CASE("What has no room is cut, and nothing behind it is written", "[format]") {
  std::array<char, 12> memory;
  for (std::size_t room = 0; room <= 10; ++room) {
    memory.fill('#');
    auto const text = fsdp::formatted_to(std::span(memory).first(room), "{}-{:.1f}-{}", 12, 3.25, "text");
    CHECK(text == std::string_view("12-3.2-text").substr(0, room));
    for (auto at = room; at < memory.size(); ++at) CHECK(memory[at] == '#');
  }
}

TEST_CASE("fail throws what it is asked for, with the text", "[format]") {
  CHECK_THROWS_AS(fsdp::fail<fsdp::OrderError>("x"), fsdp::OrderError);
  CHECK_THROWS_WITH(fsdp::fail<fsdp::ConfigError>("{} of {}", 1, "two"), "1 of two");
}

TEST_CASE("Lists are joined by commas", "[format]") {
  CHECK(fsdp::listed(std::array<int, 0>{}) == "");
  CHECK(fsdp::listed(std::array{2, 3, 4}) == "2, 3, 4");
  CHECK(fsdp::listed(std::array{"", "a", ""}) == ", a, ");
}
