// SPDX-License-Identifier: Apache-2.0
// Inside the backward of a module that sets its gradients.
#include "fsdp/fsdp.hpp"

template <class T>
struct LinearParams {
  fsdp::Tensor<T, 2> weight;
};

void gemm(float* out, float beta);

void backward(LinearParams<fsdp::Gradient<float>> g) {
  // BLOCK
}
