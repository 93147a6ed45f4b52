// SPDX-License-Identifier: Apache-2.0
// Batches of a text. Tokens are bytes.
#pragma once

#include <torch/torch.h>

#include <cstdint>
#include <fstream>
#include <iterator>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace example {

class Text {
 public:
  /// @param file  nullptr: a text of sums, such as 17+25=42
  explicit Text(char const* file) {
    std::string text;
    if (file != nullptr) {
      std::ifstream in(file, std::ios::binary);
      text.assign(std::istreambuf_iterator<char>(in), {});
      if (text.size() < 1000) throw std::runtime_error(std::string(file) + " cannot be read, or is too short");
    } else {
      for (int i = 0; i < 10000; ++i) {
        int const a = i * 37 % 100, b = i * 91 % 89;
        text += std::to_string(a) + '+' + std::to_string(b) + '=' + std::to_string(a + b) + '\n';
      }
    }
    tokens_ = torch::from_blob(text.data(), {static_cast<std::int64_t>(text.size())}, torch::kByte).to(torch::kLong);
  }
  /// Rows `first` to `first + rows` of a step's batch. @return inputs and targets, (rows, length) each
  std::pair<torch::Tensor, torch::Tensor> batch(int step, std::int64_t first, std::int64_t rows,
                                                std::int64_t length) const {
    std::vector<torch::Tensor> all;
    for (auto row = first; row < first + rows; ++row) {
      auto const begin = (step * 7919 + row * 104729) % (tokens_.size(0) - length - 1);
      all.push_back(tokens_.slice(0, begin, begin + length + 1));
    }
    auto const stacked = torch::stack(all);
    return {stacked.slice(1, 0, length), stacked.slice(1, 1)};
  }

 private:
  torch::Tensor tokens_;
};

}  // namespace example
