// SPDX-License-Identifier: Apache-2.0
// The failure of a host stream, shared with the events that it records.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>

#include "fsdp/failure.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE::host::detail {

/// A Failure in memory that flags of several events share. It outlives the stream. Written once by the stream's worker,
/// before the first flag refers to it. As in [Note: Events are the only order], everything is relaxed, and the memory
/// is used again and never freed. Texts are cut to 1,000 characters.
class FailureText {
 public:
  /// Writes the failure. The worker calls it: nothing is allocated.
  [[gnu::cold]] void write(Failure const& failure) {
    auto const size = std::min(failure.text.size(), most_text);
    for (std::size_t at = 0; at < size; at += sizeof(Word)) {
      Word word = 0;
      std::memcpy(&word, failure.text.data() + at, std::min(sizeof word, size - at));
      words_[at / sizeof(Word)].store(word, std::memory_order_relaxed);
    }
    size_.store(size, std::memory_order_relaxed);
    kind_.store(failure.kind, std::memory_order_relaxed);
  }
  [[gnu::cold]] Failure read() const {
    Failure failure{kind_.load(std::memory_order_relaxed), std::string(size_.load(std::memory_order_relaxed), '\0')};
    for (std::size_t at = 0; at < failure.text.size(); at += sizeof(Word)) {
      auto const word = words_[at / sizeof(Word)].load(std::memory_order_relaxed);
      std::memcpy(failure.text.data() + at, &word, std::min(sizeof word, failure.text.size() - at));
    }
    return failure;
  }
  /// Records that a call has thrown it.
  void tell() { told_.store(true, std::memory_order_relaxed); }
  bool was_told() const { return told_.load(std::memory_order_relaxed); }
  void share() { shares_.fetch_add(1, std::memory_order_relaxed); }

 private:
  friend class FailureTexts;
  using Word = std::uint64_t;
  static constexpr std::size_t most_text = 1000;

  std::atomic<std::uint32_t> shares_{0};
  std::atomic<ErrorKind> kind_{};
  std::atomic<bool> told_{false};
  std::atomic<std::size_t> size_{0};
  std::array<std::atomic<Word>, most_text / sizeof(Word)> words_{};
  FailureText* next_ = nullptr;  // in the pool; host threads only
};

/// Texts for reuse. Host threads only: a stream takes one when it is made.
class FailureTexts {
 public:
  [[gnu::cold]] static FailureText* take() {
    auto& pool = instance();
    std::lock_guard const lock{pool.mutex_};
    auto* const text = pool.free_ == nullptr ? new FailureText : std::exchange(pool.free_, pool.free_->next_);
    text->told_.store(false, std::memory_order_relaxed);
    text->share();
    return text;
  }
  [[gnu::cold]] static void give(FailureText* text) noexcept {
    if (text->shares_.fetch_sub(1, std::memory_order_release) != 1) return;
    auto& pool = instance();
    std::lock_guard const lock{pool.mutex_};
    text->next_ = std::exchange(pool.free_, text);
  }

 private:
  static FailureTexts& instance() {
    static auto& pool = *new FailureTexts;  // outlives every stream and event of the process
    return pool;
  }
  std::mutex mutex_;
  FailureText* free_ = nullptr;
};

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE::host::detail
