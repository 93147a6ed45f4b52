// SPDX-License-Identifier: Apache-2.0
// The secret of a run's ranks. It proves that a connection comes from a rank.
#pragma once

#include <fcntl.h>
#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <openssl/hmac.h>
#include <openssl/rand.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <string_view>
#include <utility>

#include "fsdp/comm/common/environment.hpp"
#include "fsdp/error.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE::bootstrap {

/// 32 bytes: a signature of HMAC-SHA256 (RFC 2104), or random.
using Bytes32 = std::array<unsigned char, 32>;

/// Bytes that nobody can guess. @throws ResourceError if the system has none
inline Bytes32 random_bytes() {
  Bytes32 bytes;
  if (::RAND_bytes(bytes.data(), static_cast<int>(bytes.size())) != 1)
    fail<ResourceError>("libcrypto has no random bytes");
  return bytes;
}

/// A key that all ranks have, or none.
class Secret {
 public:
  Secret() = default;
  explicit Secret(std::string key) : key_(std::move(key)) {}

  /// The content of the file FSDP_SECRET_FILE, which only its owner may read, or the variable FSDP_SECRET. Without
  /// either there is no secret. Newlines at the end do not count.
  /// @throws ConfigError if both are set, or one to nothing, the file cannot be read, belongs to another user than this
  /// one or root, others may read it, or there are fewer than `least_bytes`
  static Secret read() {
    auto const file = detail::variable("FSDP_SECRET_FILE");
    auto const text = detail::variable("FSDP_SECRET");
    if (!file.empty() && !text.empty())
      fail<ConfigError>("FSDP_SECRET_FILE and FSDP_SECRET are both set: expected one of them");
    for (char const* const name : {"FSDP_SECRET_FILE", "FSDP_SECRET"})
      if (std::getenv(name) != nullptr && detail::variable(name).empty())
        fail<ConfigError>("{} is empty: set it to a secret, or unset it", name);
    if (file.empty()) return text.empty() ? Secret() : of(text, "FSDP_SECRET");
    return of(content_of(file), formatted("FSDP_SECRET_FILE '{}'", file));
  }

  bool is_known() const { return !key_.empty(); }

  /// The signature of a text; zeros without a secret.
  Bytes32 sign(std::string_view text) const {
    Bytes32 digest{};
    if (!is_known()) return digest;
    unsigned int bytes = 0;
    auto const* const data = reinterpret_cast<unsigned char const*>(text.data());
    if (::HMAC(::EVP_sha256(), key_.data(), static_cast<int>(key_.size()), data, text.size(), digest.data(), &bytes) ==
            nullptr ||
        bytes != digest.size())
      fail<ResourceError>("libcrypto cannot compute HMAC-SHA256");
    return digest;
  }
  /// Compares in a time that does not depend on where they differ.
  bool has_signed(std::string_view text, Bytes32 const& digest) const {
    auto const expected = sign(text);
    return ::CRYPTO_memcmp(expected.data(), digest.data(), digest.size()) == 0;
  }

 private:
  static constexpr std::size_t least_bytes = 16, most_bytes = 4096;

  static Secret of(std::string text, std::string_view from) {
    while (!text.empty() && (text.back() == '\n' || text.back() == '\r')) text.pop_back();
    if (text.size() < least_bytes || text.size() > most_bytes)
      fail<ConfigError>("{}: expected {} to {} bytes, got {}; make one with: openssl rand -hex 32", from, least_bytes,
                        most_bytes, text.size());
    return Secret(std::move(text));
  }

  /// Opens a file, and does not wait for the writer of a pipe.
  static std::FILE* opened_at_once(std::string const& path) {
    int const descriptor = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    return descriptor < 0 ? nullptr : ::fdopen(descriptor, "r");
  }
  static std::string content_of(std::string const& path) {
    struct Closed {
      std::FILE* file;
      ~Closed() {
        if (file != nullptr) std::fclose(file);
      }
    } const opened{opened_at_once(path)};
    auto const what = formatted("FSDP_SECRET_FILE '{}'", path);
    if (opened.file == nullptr) fail<ConfigError>("{} cannot be read: {}", what, std::strerror(errno));
    struct stat about {};
    if (::fstat(::fileno(opened.file), &about) != 0 || !S_ISREG(about.st_mode))
      fail<ConfigError>("{} is not a regular file", what);
    if (about.st_uid != ::geteuid() && about.st_uid != 0)
      fail<ConfigError>("{} belongs to user {}, who knows the secret; expected a file of user {} or of root", what,
                        about.st_uid, ::geteuid());
    if (auto const others = about.st_mode & (S_IRWXG | S_IRWXO); others != 0)
      fail<ConfigError>("{}: other users may access it (mode 0{}{}{}); expected mode 0600: chmod 600 '{}'", what,
                        about.st_mode >> 6 & 7, about.st_mode >> 3 & 7, about.st_mode & 7, path);
    std::string text(most_bytes + 2, '\0');
    text.resize(std::fread(text.data(), 1, text.size(), opened.file));
    return text;
  }

  std::string key_;
};

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE::bootstrap
