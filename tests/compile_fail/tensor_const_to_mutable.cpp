// SPDX-License-Identifier: Apache-2.0
// A view of constant elements does not turn into one that writes.
// expect: could not convert|no viable conversion|conversion from
#include "fsdp/tensor.hpp"

void read(fsdp::Tensor<float const, 2>);
void write(fsdp::Tensor<float, 2>);
void use(fsdp::Tensor<float, 2> mutable_view, fsdp::Tensor<float const, 2> constant_view) {
  read(mutable_view);
  read(constant_view);
  write(mutable_view);
#ifndef CONTROL
  write(constant_view);
#endif
}
