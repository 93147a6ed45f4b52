// SPDX-License-Identifier: Apache-2.0
// Where the secret of a run comes from, and what is refused; HMAC-SHA256 as RFC 4231 has it.
// links: OpenSSL::Crypto
// skip-tsan
#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>

#include "fsdp/detail/tcp/environment.hpp"
#include "tests/catch.hpp"
#include "tests/support/temporary_folder.hpp"

namespace {

using fsdp::bootstrap::Secret;

/// Sets a variable of the environment while it lives.
class Setting {
 public:
  Setting(char const* name, std::string const& value) : name_(name) { ::setenv(name, value.c_str(), 1); }
  ~Setting() { ::unsetenv(name_); }

 private:
  char const* name_;
};

std::string refusal() {
  try {
    static_cast<void>(Secret::read());
  } catch (fsdp::ConfigError const& error) {
    return error.what();
  }
  return "accepted";
}
bool contains(std::string const& text, std::string const& part) { return text.find(part) != std::string::npos; }

std::string written(std::filesystem::path const& path, std::string const& text, ::mode_t mode = 0600) {
  std::ofstream(path) << text;
  ::chmod(path.c_str(), mode);
  return path.string();
}

}  // namespace

TEST_CASE("a secret is the file's content or the variable's, without newlines at its end", "[secret]") {
  fsdp::testing::TemporaryFolder const folder;
  CHECK_FALSE(Secret::read().is_known());
  auto const expected = Secret("sixteen bytes or more").sign("text");
  {
    Setting const file("FSDP_SECRET_FILE", written(folder.path / "secret", "sixteen bytes or more\n"));
    CHECK(Secret::read().sign("text") == expected);
    CHECK(Secret::read().has_signed("text", expected));
    CHECK_FALSE(Secret::read().has_signed("another text", expected));
  }
  Setting const variable("FSDP_SECRET", "sixteen bytes or more");
  CHECK(Secret::read().sign("text") == expected);
}

TEST_CASE("a secret that others may read, or that is none, is refused with the remedy", "[secret]") {
  fsdp::testing::TemporaryFolder const folder;
  auto const file = [&](std::string const& text, ::mode_t mode = 0600) {
    Setting const set("FSDP_SECRET_FILE", written(folder.path / "secret", text, mode));
    return refusal();
  };
  std::string const good = "sixteen bytes or more";
  CHECK(file(good) == "accepted");
  CHECK(file(good, 0400) == "accepted");
  for (auto const mode : {0640, 0604, 0610, 0644}) {
    auto const text = file(good, static_cast<::mode_t>(mode));
    CHECK(contains(text, "other users may access it"));
    CHECK(contains(text, "chmod 600 '" + (folder.path / "secret").string() + "'"));
    CHECK_FALSE(contains(text, good));
  }
  CHECK(contains(file(good, 0640), "(mode 0640)"));
  if (::geteuid() == 0) {  // who else can give files away
    auto const path = folder.path / "secret";
    auto const owned_by = [&](::uid_t owner) {
      Setting const set("FSDP_SECRET_FILE", written(path, good));
      REQUIRE(::chown(path.c_str(), owner, 0) == 0);
      return refusal();
    };
    CHECK(
        contains(owned_by(12345), "belongs to user 12345, who knows the secret; expected a file of user 0 or of root"));
    CHECK(owned_by(0) == "accepted");
  }
  CHECK(contains(file(""), "expected 16 to 4096 bytes, got 0; make one with: openssl rand -hex 32"));
  CHECK(contains(file("\n\n"), "got 0;"));
  CHECK(contains(file("fifteen bytes.."), "got 15;"));
  CHECK(contains(file(std::string(5000, 'x')), "expected 16 to 4096 bytes"));
  {
    Setting const set("FSDP_SECRET_FILE", (folder.path / "missing").string());
    CHECK(contains(refusal(), "missing' cannot be read: No such file or directory"));
  }
  {
    Setting const set("FSDP_SECRET_FILE", folder.path.string());
    CHECK(contains(refusal(), "is not a regular file"));
  }
  {
    auto const pipe = folder.path / "pipe";
    REQUIRE(::mkfifo(pipe.c_str(), 0600) == 0);
    Setting const set("FSDP_SECRET_FILE", pipe.string());
    CHECK(contains(refusal(), "is not a regular file"));
  }
  for (std::string const name : {"FSDP_SECRET_FILE", "FSDP_SECRET"}) {
    Setting const set(name.c_str(), "");
    CHECK(contains(refusal(), name + " is empty: set it to a secret"));
  }
  Setting const variable("FSDP_SECRET", "short");
  CHECK(contains(refusal(), "FSDP_SECRET: expected 16 to 4096 bytes, got 5"));
  CHECK(contains(file(good), "FSDP_SECRET_FILE and FSDP_SECRET are both set: expected one of them"));
}

TEST_CASE("signatures are HMAC-SHA256", "[secret]") {
  // RFC 4231, test case 7: the key has 131 bytes.
  auto const digest = Secret(std::string(131, '\xaa'))
                          .sign(
                              "This is a test using a larger than block-size key and a larger than block-size data. "
                              "The key needs to be hashed before being used by the HMAC algorithm.");
  std::string hex;
  for (auto const byte : digest) hex += fsdp::formatted("{:02x}", static_cast<unsigned>(byte));
  CHECK(hex == "9b09ffa71b942fcb27635fbcd5b0e944bfdc63644f0713938a7f51535c3a35e2");
  CHECK(Secret().sign("text") == fsdp::bootstrap::Bytes32{});
}
