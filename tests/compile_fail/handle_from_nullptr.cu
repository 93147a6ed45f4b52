// SPDX-License-Identifier: Apache-2.0
// An owner of a CUDA handle cannot be made from nullptr: an empty one is default-constructed.
// expect: cannot be referenced -- it is a deleted function
#include "fsdp/detail/cuda/handles.hpp"

#ifdef CONTROL
fsdp::cuda::UniqueStream stream{};
#else
fsdp::cuda::UniqueStream stream{nullptr};
#endif
