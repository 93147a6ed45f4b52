// SPDX-License-Identifier: Apache-2.0
#include "tests/standin/nccl/shared.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <climits>
#include <cstring>
#include <ctime>
#include <map>
#include <mutex>
#include <new>
#include <random>
#include <string>
#include <utility>

namespace standin::nccl {
namespace {

constexpr char magic[] = "standin";

/// Content of an identifier.
struct Address {
  char magic[8];
  std::int32_t process, file;
  std::uint64_t nonce;
};
static_assert(sizeof(Address) <= sizeof(ncclUniqueId));

constexpr std::size_t offers_begin = (sizeof(Header) + 4095) / 4096 * 4096;
/// Pages are made when they are touched, so few ranks cost little.
constexpr std::size_t total_bytes = offers_begin + most_ranks * 2 * piece_bytes;

Address address_of(ncclUniqueId const& id) {
  Address address;
  std::memcpy(&address, id.internal, sizeof(address));
  return address;
}

struct Files {
  std::mutex mutex;
  std::map<std::uint64_t, int> by_nonce;
};
Files& files() {
  static auto* const instance = new Files;
  return *instance;
}

Header* map(int file) {
  void* const memory = ::mmap(nullptr, total_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  return memory == MAP_FAILED ? nullptr : static_cast<Header*>(memory);  // zeros, which all members begin as
}

}  // namespace

bool Shared::make_identifier(ncclUniqueId& id) {
  int const file = ::memfd_create("fsdp-standin-nccl", MFD_CLOEXEC);
  if (file < 0) return false;
  Header* const header = ::ftruncate(file, static_cast<off_t>(total_bytes)) == 0 ? map(file) : nullptr;
  if (header == nullptr) {
    int const error = errno;
    ::close(file);
    errno = error;
    return false;
  }
  std::random_device random;
  auto const nonce = (static_cast<std::uint64_t>(random()) << 32 | random()) | 1;
  header->nonce = nonce;
  ::munmap(header, total_bytes);

  Address address{};
  std::memcpy(address.magic, magic, sizeof(magic));
  address.process = ::getpid();
  address.file = file;
  address.nonce = nonce;
  std::memset(id.internal, 0, sizeof(id.internal));
  std::memcpy(id.internal, &address, sizeof(address));
  std::scoped_lock const lock(files().mutex);
  files().by_nonce.emplace(nonce, file);
  return true;
}

void Shared::close_identifier(ncclUniqueId const& id) {
  auto const address = address_of(id);
  if (address.process != ::getpid()) return;  // a copy that fork() made is not this process's own
  std::scoped_lock const lock(files().mutex);
  auto const entry = files().by_nonce.find(address.nonce);
  if (entry == files().by_nonce.end()) return;
  ::close(entry->second);
  files().by_nonce.erase(entry);
}

Shared::Shared(Shared&& other) noexcept : header_(std::exchange(other.header_, nullptr)) {}
Shared::~Shared() {
  if (header_ != nullptr) ::munmap(header_, total_bytes);
}

std::string Shared::open(ncclUniqueId const& id) {
  auto const address = address_of(id);
  if (std::memcmp(address.magic, magic, sizeof(magic)) != 0) return "the identifier is not from ncclGetUniqueId";
  auto const path = fmt::format("/proc/{}/fd/{}", address.process, address.file);
  int const file = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (file < 0)
    return fmt::format("process {}, which made the identifier, is gone, or the identifier was used up ({}: {})",
                       address.process, path, std::strerror(errno));
  Header* const header = map(file);
  int const error = errno;
  ::close(file);
  if (header == nullptr) return fmt::format("mmap: {}", std::strerror(error));
  header_ = header;
  if (header->nonce != address.nonce) return fmt::format("the identifier was used up ({} is another file)", path);
  return {};
}

std::byte* Shared::offer(int rank, std::uint64_t piece) const {
  auto* const first = reinterpret_cast<std::byte*>(header_) + offers_begin;
  return first + (static_cast<std::size_t>(rank) * 2 + piece % 2) * piece_bytes;
}

void Shared::ring() const {
  header_->bell.fetch_add(1);
  ::syscall(SYS_futex, &header_->bell, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

void Shared::wait(std::uint32_t bell, std::chrono::milliseconds most) const {
  timespec const span{most.count() / 1000, most.count() % 1000 * 1000000};
  ::syscall(SYS_futex, &header_->bell, FUTEX_WAIT, bell, &span, nullptr, 0);
}

}  // namespace standin::nccl
