// SPDX-License-Identifier: Apache-2.0
// Defines TRANSFORMER_THREAD_SANITIZER under ThreadSanitizer, which cannot see into generated code and libraries: plain
// loops stand for them.
#pragma once

#if defined(__SANITIZE_THREAD__)
#define TRANSFORMER_THREAD_SANITIZER 1
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define TRANSFORMER_THREAD_SANITIZER 1
#endif
#endif
