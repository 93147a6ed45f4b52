// SPDX-License-Identifier: Apache-2.0
// Whether the test is built under a sanitizer.
#pragma once

namespace fsdp::testing {

#if defined(__SANITIZE_ADDRESS__)
inline constexpr bool has_address_sanitizer = true, has_thread_sanitizer = false;
#elif defined(__SANITIZE_THREAD__)
inline constexpr bool has_address_sanitizer = false, has_thread_sanitizer = true;
#elif defined(__has_feature)  // clang++; g++ 14 too
inline constexpr bool has_address_sanitizer = __has_feature(address_sanitizer),
                      has_thread_sanitizer = __has_feature(thread_sanitizer);
#else
inline constexpr bool has_address_sanitizer = false, has_thread_sanitizer = false;
#endif
inline constexpr bool has_sanitizer = has_address_sanitizer || has_thread_sanitizer;

/// Programs are about ten times as slow under a sanitizer: grids of strategies and ranks have fewer cells.
#if defined(FSDP_SANITIZE_ALL)
inline constexpr bool sanitized = false;
#else
inline constexpr bool sanitized = has_sanitizer;
#endif

/// Whether the next cell of a grid is to be computed: under AddressSanitizer, one of `every` is; under ThreadSanitizer,
/// whose programs take three times as long again, one of `3 * every + 2`. All values of an axis take turns if neither of
/// the two has a factor in common with the length of the axis.
inline bool next_cell(int every = 3) {
  static int cells = 0;
  return !sanitized || cells++ % (has_thread_sanitizer ? 3 * every + 2 : every) == 0;
}

}  // namespace fsdp::testing
