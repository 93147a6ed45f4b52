// SPDX-License-Identifier: Apache-2.0
// NVTX ranges and stream names, for profilers. Costs a pointer test per call when no tool is attached.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstring>
#include <string_view>
#include <utility>

#include "fsdp/version.hpp"

#if __has_include(<nvtx3/nvToolsExt.h>) && !defined(FSDP_NO_NVTX)
#include <nvtx3/nvToolsExt.h>
#include <nvtx3/nvToolsExtCudaRt.h>
#define FSDP_HAS_NVTX 1
#else
#define FSDP_HAS_NVTX 0
#endif

namespace fsdp::inline FSDP_VERSION_NAMESPACE::cuda {

namespace detail {
/// Texts joined by spaces in a fixed buffer, cut when too long, terminated by zero.
class ShortText {
 public:
  template <class... Parts>
  explicit ShortText(Parts... parts) {
    (append(parts), ...);
    text_[size_] = '\0';
  }
  char const* c_str() const { return text_; }

 private:
  void append(std::string_view part) {
    if (part.empty()) return;
    if (size_ > 0 && size_ < capacity) text_[size_++] = ' ';
    auto const bytes = part.size() < capacity - size_ ? part.size() : capacity - size_;
    std::memcpy(text_ + size_, part.data(), bytes);
    size_ += bytes;
  }
  static constexpr std::size_t capacity = 127;
  std::size_t size_ = 0;
  char text_[capacity + 1];
};

#if FSDP_HAS_NVTX
inline nvtxDomainHandle_t nvtx_domain() {
  static nvtxDomainHandle_t const domain = nvtxDomainCreateA("fsdp");
  return domain;
}
#endif
}  // namespace detail

/// A range on the calling thread's timeline, in the domain "fsdp", for the object's life: `NvtxRange range{"block.3",
/// "backward"}`. Ranges of one thread end in the reverse order of their beginning.
class NvtxRange {
 public:
  NvtxRange() = default;
  /// Names the range by unit, pass and, where given, operation.
  explicit NvtxRange(std::string_view unit, std::string_view pass = {}, std::string_view operation = {}) {
#if FSDP_HAS_NVTX
    domain_ = detail::nvtx_domain();
    if (domain_ == nullptr) return;  // no tool is attached
    detail::ShortText const text(unit, pass, operation);
    nvtxEventAttributes_t attributes{};
    attributes.version = NVTX_VERSION;
    attributes.size = NVTX_EVENT_ATTRIB_STRUCT_SIZE;
    attributes.messageType = NVTX_MESSAGE_TYPE_ASCII;
    attributes.message.ascii = text.c_str();
    static_cast<void>(nvtxDomainRangePushEx(domain_, &attributes));
#else
    static_cast<void>(unit);
    static_cast<void>(pass);
    static_cast<void>(operation);
#endif
  }
  NvtxRange(NvtxRange&& other) noexcept { swap(other); }
  /// Ends the own range first: where both began on one thread, call end() before the other begins.
  NvtxRange& operator=(NvtxRange&& other) noexcept {
    end();
    swap(other);
    return *this;
  }
  ~NvtxRange() { end(); }
  void end() {
#if FSDP_HAS_NVTX
    if (domain_ != nullptr) static_cast<void>(nvtxDomainRangePop(std::exchange(domain_, nullptr)));
#endif
  }

 private:
#if FSDP_HAS_NVTX
  void swap(NvtxRange& other) noexcept { std::swap(domain_, other.domain_); }
  nvtxDomainHandle_t domain_ = nullptr;
#else
  void swap(NvtxRange&) noexcept {}
#endif
};

/// Gives `stream` a name in profilers.
inline void name_stream(cudaStream_t stream, std::string_view label) {
#if FSDP_HAS_NVTX
  nvtxNameCudaStreamA(stream, detail::ShortText(label).c_str());
#else
  static_cast<void>(stream);
  static_cast<void>(label);
#endif
}

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE::cuda
