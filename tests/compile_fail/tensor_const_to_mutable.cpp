// SPDX-License-Identifier: Apache-2.0
// A view of constant elements does not turn into one that writes.
// expect: could not convert|no viable conversion|conversion from
#include "fsdp/tensor.hpp"

void reads(fsdp::Tensor<float const, 2>);
void writes(fsdp::Tensor<float, 2>);
void use(fsdp::Tensor<float, 2> mutable_view, fsdp::Tensor<float const, 2> constant_view) {
  reads(mutable_view);
  reads(constant_view);
  writes(mutable_view);
#ifndef CONTROL
  writes(constant_view);
#endif
}
