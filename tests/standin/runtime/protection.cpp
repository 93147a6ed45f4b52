// SPDX-License-Identifier: Apache-2.0
// Device memory out of the host's reach.
#include <sys/mman.h>

#include "tests/standin/runtime/state.hpp"

namespace standin {

/// [Note: Protection keys]
/// A host thread that touches device memory crashes where there is a GPU. Here it does too, where the processor has
/// protection keys: the pages of device memory carry a key on which threads have no rights, but for the thread that
/// runs an operation of a stream, while it does. A new thread inherits its creator's rights, which are none; a signal
/// handler has none. (pkeys(7)) Processors without keys skip this: what the host then reads of device memory goes
/// unnoticed.
namespace {
int key() {
  static int const made = pkey_alloc(0, PKEY_DISABLE_ACCESS);  // -1 without keys
  return made;
}
int const made_before_main = key();
}  // namespace

bool device_memory_is_protected() { return key() >= 0; }
void open_device_memory() {
  if (key() >= 0) pkey_set(key(), 0);
}
void close_device_memory() {
  if (key() >= 0) pkey_set(key(), PKEY_DISABLE_ACCESS);
}
void protect_device_memory(std::byte* pages, std::size_t bytes) {
  static_cast<void>(made_before_main);
  if (key() < 0) return;
  watch_faults();
  pkey_mprotect(pages, bytes, PROT_READ | PROT_WRITE, key());
}

}  // namespace standin
