// SPDX-License-Identifier: Apache-2.0
// Whether the test is built under a sanitizer.
#pragma once

namespace fsdp::testing {

/// Programs are about ten times as slow: grids of strategies and ranks have fewer cells.
#if (defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)) && !defined(FSDP_SANITIZE_ALL)
inline constexpr bool sanitized = true;
#else
inline constexpr bool sanitized = false;
#endif

/// Whether the next cell of a grid is to be computed: under a sanitizer, one of `every` is.
inline bool next_cell(int every = 3) {
  static int cells = 0;
  return !sanitized || cells++ % every == 0;
}

}  // namespace fsdp::testing
