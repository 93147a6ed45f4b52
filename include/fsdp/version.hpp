// SPDX-License-Identifier: Apache-2.0
// The version of the library, and its requirements on the compiler. Every translation unit sees this before any other
// line of fsdp.
#pragma once

#if __cplusplus < 202002L
#error "fsdp needs C++20: compile with -std=c++20"
#define FSDP_REFUSED
#elif !defined(__cpp_exceptions)
#error "fsdp needs exceptions: compile without -fno-exceptions"
#define FSDP_REFUSED
#elif defined(slots)
#error "fsdp uses the name `slots`, which is a macro of Qt: define QT_NO_KEYWORDS, or include fsdp before Qt"
#define FSDP_REFUSED
#elif defined(min) || defined(max)
#error "fsdp uses std::min and std::max, and one of both names is a macro: define NOMINMAX, or include fsdp first"
#define FSDP_REFUSED
#endif
#ifdef FSDP_REFUSED  // a file that does not exist ends the compilation, where thousands of errors would follow
#include <fsdp/the_error_above_says_why>
#endif

#define FSDP_VERSION_MAJOR 0
#define FSDP_VERSION_MINOR 1
#define FSDP_VERSION_PATCH 0

#define FSDP_JOINED_AS_GIVEN(major_number, minor_number, patch_number) v##major_number##_##minor_number##_##patch_number
#define FSDP_JOINED(major_number, minor_number, patch_number) \
  FSDP_JOINED_AS_GIVEN(major_number, minor_number, patch_number)
#define FSDP_QUOTED_AS_GIVEN(text) #text
#define FSDP_QUOTED(text) FSDP_QUOTED_AS_GIVEN(text)

/// The inline namespace of everything in fsdp: parts of one program may be compiled with different versions, whose
/// symbols have different names.
#define FSDP_VERSION_NAMESPACE FSDP_JOINED(FSDP_VERSION_MAJOR, FSDP_VERSION_MINOR, FSDP_VERSION_PATCH)

namespace fsdp::inline FSDP_VERSION_NAMESPACE {

/// Major, minor and patch number.
inline constexpr char version[] =
    FSDP_QUOTED(FSDP_VERSION_MAJOR) "." FSDP_QUOTED(FSDP_VERSION_MINOR) "." FSDP_QUOTED(FSDP_VERSION_PATCH);

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE
