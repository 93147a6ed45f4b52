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

namespace fsdp::host {

/// A range of addresses that nothing else gets while it lives. The program can access it between open() and close();
/// any other access ends the process with SIGSEGV, which AddressSanitizer reports. The contents are lost when it is
/// closed, and it takes no memory then. The end lies at an inaccessible page, so that accesses behind it are found too.
class GuardedMemory {
 public:
  GuardedMemory() = default;
  /// @throws ResourceError if there is no such range of addresses
  [[gnu::cold]] explicit GuardedMemory(std::size_t bytes) {
    if (bytes == 0) return;
    auto const page = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
    bytes_ = (bytes + alignment - 1) / alignment * alignment;
    pages_ = (bytes_ + page - 1) / page * page;
    reserved_ = pages_ + page;
    void* const base = ::mmap(nullptr, reserved_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (base == MAP_FAILED)
      fail<ResourceError>("cannot reserve {} bytes of addresses: {}", reserved_, std::strerror(errno));
    base_ = static_cast<std::byte*>(base);
  }
  GuardedMemory(GuardedMemory&& other) noexcept
      : base_(std::exchange(other.base_, nullptr)),
        bytes_(other.bytes_),
        pages_(other.pages_),
        reserved_(other.reserved_) {}
  GuardedMemory& operator=(GuardedMemory&&) = delete;
  ~GuardedMemory() {
    if (base_ != nullptr) ::munmap(base_, reserved_);
  }

  /// Aligned to 256 bytes; nullptr for 0 bytes.
  void* data() const { return base_ == nullptr ? nullptr : base_ + (pages_ - bytes_); }
  /// @throws ResourceError
  void open() const { protect(PROT_READ | PROT_WRITE); }
  /// @throws ResourceError
  void close() const {
    if (base_ == nullptr) return;
    ::madvise(base_, pages_, MADV_DONTNEED);
    protect(PROT_NONE);
  }

 private:
  static constexpr std::size_t alignment = 256;

  [[gnu::cold]] void protect(int access) const {
    if (base_ != nullptr && ::mprotect(base_, pages_, access) != 0)
      fail<ResourceError>("cannot change the protection of {} bytes: {}", pages_, std::strerror(errno));
  }

  std::byte* base_ = nullptr;
  std::size_t bytes_ = 0, pages_ = 0, reserved_ = 0;
};

}  // namespace fsdp::host
