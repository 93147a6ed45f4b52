// SPDX-License-Identifier: Apache-2.0
// Classes of kernels, by the kernels' names.
#pragma once

#include <array>
#include <cstddef>
#include <string_view>

namespace bench {

enum class KernelClass : unsigned char {
  matrix_products,
  attention,
  layer_norm,  ///< with biases, residuals, and the column sums that are their gradients
  gelu,        ///< and SwiGLU
  classifier,
  embedding,
  optimizer,
  casts,
  collectives,
  other,
  count_
};
inline constexpr std::size_t class_count = static_cast<std::size_t>(KernelClass::count_);

inline constexpr std::array<std::string_view, class_count> class_names{
    "matrix products", "attention",       "norms, biases, sums", "GELU",        "classifier",
    "embedding",       "optimizer, norm", "casts, zeroing",      "collectives", "other"};

constexpr std::string_view name(KernelClass of) { return class_names[static_cast<std::size_t>(of)]; }

/// A type's name, with its namespaces.
template <class Kernel>
constexpr std::string_view kernel_name() {
  std::string_view const text =
      __PRETTY_FUNCTION__;  // "... [with Kernel = name; ...]"; some compilers: "[Kernel=name]"
  auto begin = text.find("Kernel = ");
  begin = begin != std::string_view::npos ? begin + 9 : text.find("Kernel=") + 7;
  return text.substr(begin, text.find_first_of(";]", begin) - begin);
}

/// The class of a kernel: the first row whose word is in its name. A kernel that no row knows is "other", and
/// the report names it.
constexpr KernelClass class_of(std::string_view kernel) {
  struct Row {
    std::string_view word;
    KernelClass of;
  };
  using enum KernelClass;
  constexpr Row rows[]{
      {"Attention", attention},
      {"transformer::flash::", attention},
      {"Softmax", attention},
      {"Rope", attention},
      {"DropoutRows", attention},  // of probabilities
      {"Gelu", gelu},
      {"Swiglu", gelu},
      {"CrossEntropy", classifier},
      {"Classifier", classifier},
      {"transformer::detail::Sum", classifier},  // of losses
      {"Embedding", embedding},
      {"TokenForward", embedding},
      {"TokenBackward", embedding},
      {"PositionBackward", embedding},
      {"LayerNorm", layer_norm},
      {"RmsNorm", layer_norm},
      {"Residual", layer_norm},
      {"Dropout", layer_norm},  // before the residual addition
      {"BiasAdd", layer_norm},
      {"transformer::detail::Add", layer_norm},  // residuals, and on the host the second half of column sums
      {"BiasBackward", layer_norm},              // column sums: gradients of biases and of LayerNorm
      {"ColumnSums", layer_norm},
      {"AddPartialRows", layer_norm},
      {"AdamW", optimizer},
      {"BeginStep", optimizer},
      {"NormPartials", optimizer},
      {"NormCombine", optimizer},
      {"NormDigits", optimizer},
      {"ClipFactor", optimizer},
      {"CountSkipped", optimizer},
      {"SumFew", collectives},
      {"SumMany", collectives},
      {"::kernels::detail::Cast", casts},
      {"::kernels::detail::Accumulate", casts},
      {"::kernels::detail::Add", casts}};
  for (auto const& row : rows)
    if (kernel.find(row.word) != std::string_view::npos) return row.of;
  return other;
}

}  // namespace bench
