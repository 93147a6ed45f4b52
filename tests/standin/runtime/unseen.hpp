// SPDX-License-Identifier: Apache-2.0
// Annotations for ThreadSanitizer: synchronisation of the stand-ins, and code that it ignores.
#pragma once

#if defined(__SANITIZE_THREAD__)
#define STANDIN_TSAN 1
#include <sanitizer/tsan_interface.h>
extern "C" {
void AnnotateIgnoreReadsBegin(char const* file, int line);
void AnnotateIgnoreReadsEnd(char const* file, int line);
void AnnotateIgnoreWritesBegin(char const* file, int line);
void AnnotateIgnoreWritesEnd(char const* file, int line);
void AnnotateIgnoreSyncBegin(char const* file, int line);
void AnnotateIgnoreSyncEnd(char const* file, int line);
}
#else
#define STANDIN_TSAN 0
#endif

namespace standin {

/// [Note: The stand-in's own locks order nothing]
/// CUDA promises no order between two host threads because both called it, nor between two streams because one driver
/// runs them. The stand-in's bookkeeping takes a mutex in every call; were ThreadSanitizer to see it, it would take
/// every two calls for ordered, and miss what they leave unordered. So while an Unseen lives, its thread's (or fiber's)
/// accesses and locks do not exist for ThreadSanitizer. The orders that CUDA does promise are told by release and
/// acquire, outside of every Unseen.
class [[nodiscard]] Unseen {
 public:
  Unseen() {
#if STANDIN_TSAN
    AnnotateIgnoreReadsBegin(__FILE__, __LINE__);
    AnnotateIgnoreWritesBegin(__FILE__, __LINE__);
    AnnotateIgnoreSyncBegin(__FILE__, __LINE__);
#endif
  }
  ~Unseen() {
#if STANDIN_TSAN
    AnnotateIgnoreSyncEnd(__FILE__, __LINE__);
    AnnotateIgnoreWritesEnd(__FILE__, __LINE__);
    AnnotateIgnoreReadsEnd(__FILE__, __LINE__);
#endif
  }
  Unseen(Unseen const&) = delete;
  Unseen& operator=(Unseen const&) = delete;
};

/// Orders that CUDA promises, told while exactly one Unseen lives.
inline void release_unseen([[maybe_unused]] void* tag) {
#if STANDIN_TSAN
  AnnotateIgnoreSyncEnd(__FILE__, __LINE__);
  __tsan_release(tag);
  AnnotateIgnoreSyncBegin(__FILE__, __LINE__);
#endif
}
inline void acquire_unseen([[maybe_unused]] void* tag) {
#if STANDIN_TSAN
  AnnotateIgnoreSyncEnd(__FILE__, __LINE__);
  __tsan_acquire(tag);
  AnnotateIgnoreSyncBegin(__FILE__, __LINE__);
#endif
}

/// Calls f as if the Unseen that lives were not there.
template <class F>
void see(F const& f) {
#if STANDIN_TSAN
  AnnotateIgnoreSyncEnd(__FILE__, __LINE__);
  AnnotateIgnoreWritesEnd(__FILE__, __LINE__);
  AnnotateIgnoreReadsEnd(__FILE__, __LINE__);
  f();
  AnnotateIgnoreReadsBegin(__FILE__, __LINE__);
  AnnotateIgnoreWritesBegin(__FILE__, __LINE__);
  AnnotateIgnoreSyncBegin(__FILE__, __LINE__);
#else
  f();
#endif
}

}  // namespace standin
