// SPDX-License-Identifier: Apache-2.0
// A precision policy is made of float, bf16 and fp16.
// expect: takes float, fsdp::bf16 or fsdp::fp16 as parameter, reduction and master type
#include "fsdp/tensor.hpp"

#ifdef CONTROL
using Reduce = fsdp::fp16;
#else
using Reduce = double;
#endif
static_assert(sizeof(fsdp::Precision<float, Reduce, fsdp::bf16>::Master) == 2);
