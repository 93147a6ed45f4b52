// SPDX-License-Identifier: Apache-2.0
// A process's place in a run without MPI, from environment variables; and the secret that proves that a connection
// comes from a rank.
#pragma once

#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <openssl/hmac.h>
#include <openssl/rand.h>

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <charconv>
#include <chrono>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>

#include "fsdp/detail/host/backoff.hpp"
#include "fsdp/error.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE::bootstrap {

namespace detail {
/// An environment variable, or "" if it is not set.
inline std::string variable(char const* name) {
  char const* const text = std::getenv(name);
  return text == nullptr ? "" : text;
}
/// @throws ConfigError unless the variable is a whole number in [least, most]
inline int number_variable(char const* name, int least, int most) {
  auto const text = variable(name);
  int value = 0;
  auto const [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc{} || end != text.data() + text.size() || value < least || value > most)
    fail<ConfigError>("{}='{}': expected a whole number from {} to {}", name, text, least, most);
  return value;
}
}  // namespace detail

/// Time that a rank waits for its peers: FSDP_TIMEOUT (seconds) where it is set, else host::wait_deadline(), ten
/// minutes.
inline std::chrono::milliseconds default_timeout() {
  if (detail::variable("FSDP_TIMEOUT").empty())
    return std::chrono::duration_cast<std::chrono::milliseconds>(host::wait_deadline());
  return std::chrono::seconds(detail::number_variable("FSDP_TIMEOUT", 1, 10'000'000));
}

/// This process's place in a run, as launchers such as torchrun give it.
struct Environment {
  int rank = 0;
  int size = 1;
  int local_rank = -1;  ///< place on this machine; -1: not given
  std::string address = "127.0.0.1";
  int port = 29500;
  std::string_view port_name = "MASTER_PORT";  ///< source of the port, for messages

  /// Reads RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT. Without RANK and WORLD_SIZE: a run of one rank.
  ///
  /// [Note: The port beside torchrun's] MASTER_PORT is where rank 0 listens, unless TORCHELASTIC_USE_AGENT_STORE says
  /// that torchrun's agent listens there itself, for PyTorch's processes to connect to. Then it is the next port (below
  /// the highest, the one before): each rank knows it without asking. FSDP_PORT, if set on all ranks, is taken instead.
  /// @throws ConfigError if a variable is missing beside others, or malformed
  static Environment read() {
    Environment place;
    if (!detail::variable("LOCAL_RANK").empty()) place.local_rank = detail::number_variable("LOCAL_RANK", 0, 1 << 20);
    bool const ranked = !detail::variable("RANK").empty();
    bool const sized = !detail::variable("WORLD_SIZE").empty();
    if (!ranked && !sized) return place;
    if (ranked != sized)
      fail<ConfigError>("RANK and WORLD_SIZE must both be set, but {} is not set", ranked ? "WORLD_SIZE" : "RANK");
    place.size = detail::number_variable("WORLD_SIZE", 1, 1 << 20);
    place.rank = detail::number_variable("RANK", 0, place.size - 1);
    if (place.size == 1) return place;
    place.address = detail::variable("MASTER_ADDR");
    if (place.address.empty())
      fail<ConfigError>("rank {}: MASTER_ADDR is not set; set it to the address of rank 0's machine", place.rank);
    if (detail::variable("MASTER_PORT").empty())
      fail<ConfigError>("rank {}: MASTER_PORT is not set; set it to a free port of rank 0's machine", place.rank);
    place.port = detail::number_variable("MASTER_PORT", 1, 65535);
    if (agent_listens()) {
      place.port += place.port < 65535 ? 1 : -1;
      place.port_name = "beside MASTER_PORT, which is torchrun's agent's";
    }
    if (!detail::variable("FSDP_PORT").empty()) {
      place.port = detail::number_variable("FSDP_PORT", 1, 65535);
      place.port_name = "FSDP_PORT";
    }
    return place;
  }

 private:
  static bool agent_listens() {
    auto const text = detail::variable("TORCHELASTIC_USE_AGENT_STORE");
    return text == "True" || text == "true" || text == "1";
  }
};

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
