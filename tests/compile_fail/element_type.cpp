// SPDX-License-Identifier: Apache-2.0
// Only the five element types can be moved.
// expect: fsdp moves float, double, bf16, fp16 and std::int64_t
#include "fsdp/tensor.hpp"

#ifdef CONTROL
using Element = fsdp::bf16;
#else
using Element = unsigned;
#endif
static_assert(fsdp::dtype_of<Element> != fsdp::DType::f64);
