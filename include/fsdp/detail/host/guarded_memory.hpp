// SPDX-License-Identifier: Apache-2.0
// Memory that can be made inaccessible, to find accesses at the wrong time.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstring>
#include <utility>

#include "fsdp/error.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE::host {

/// A range of addresses that nothing else gets while it lives. The program can access it between open() and close();
/// any other access ends the process with SIGSEGV, which AddressSanitizer reports. The contents are lost when it is
/// closed, and it takes no memory then. Inaccessible addresses lie before and behind it.
class GuardedMemory {
 public:
  GuardedMemory() = default;
  /// @param guard  so many bytes before and behind are inaccessible; at least a page behind
  /// @throws ResourceError if there is no such range of addresses
  [[gnu::cold]] explicit GuardedMemory(std::size_t bytes, std::size_t guard = 0) {
    if (bytes == 0) return;
    auto const page = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
    auto const round_up = [](std::size_t value, std::size_t to) { return (value + to - 1) / to * to; };
    bytes = round_up(bytes, alignment);
    guard = round_up(guard + 1, page);
    pages_ = round_up(bytes, page);
    reserved_ = guard + pages_ + guard;
    void* const base = ::mmap(nullptr, reserved_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (base == MAP_FAILED)
      fail<ResourceError>("cannot reserve {} bytes of addresses: {}", reserved_, std::strerror(errno));
    base_ = static_cast<std::byte*>(base);
    first_ = base_ + guard;
    data_ = first_ + (pages_ - bytes);  // the end lies at a guard
  }
  GuardedMemory(GuardedMemory&& other) noexcept { swap(other); }
  GuardedMemory& operator=(GuardedMemory&& other) noexcept {
    swap(other);
    return *this;
  }
  ~GuardedMemory() {
    if (base_ != nullptr) ::munmap(base_, reserved_);
  }

  /// Aligned to 256 bytes; nullptr for 0 bytes.
  void* data() const { return data_; }
  /// @throws ResourceError
  void open() const { protect(PROT_READ | PROT_WRITE); }
  /// @throws ResourceError
  void close() const {
    if (base_ == nullptr) return;
    ::madvise(first_, pages_, MADV_DONTNEED);
    protect(PROT_NONE);
  }

 private:
  static constexpr std::size_t alignment = 256;

  void swap(GuardedMemory& other) noexcept {
    std::swap(base_, other.base_);
    std::swap(first_, other.first_);
    std::swap(data_, other.data_);
    std::swap(pages_, other.pages_);
    std::swap(reserved_, other.reserved_);
  }
  [[gnu::cold]] void protect(int access) const {
    if (base_ != nullptr && ::mprotect(first_, pages_, access) != 0)
      fail<ResourceError>("cannot change the protection of {} bytes: {}", pages_, std::strerror(errno));
  }

  std::byte *base_ = nullptr, *first_ = nullptr, *data_ = nullptr;
  std::size_t pages_ = 0, reserved_ = 0;
};

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE::host
