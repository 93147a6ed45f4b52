// SPDX-License-Identifier: Apache-2.0
// Chooses the sequences on which a rank trains and evaluates.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "transformer/data/dataset.hpp"
#include "transformer/data/window_order.hpp"

namespace transformer {

/// [Note: Micro-steps without sequences]
/// An iteration has gradient_accumulation_steps batches of B sequences, which the ranks take in turns. If their number
/// is not a multiple of the ranks, the last ranks find no batch in the last turn. They make that micro-step too,
/// because its gathers and reductions are collective, but with weight 0. It repeats the sequences and the dropout masks
/// of another batch of the iteration, without targets. Cross-entropy writes zeros for a row without a target, whatever
/// its logits are, and the activations are finite wherever those of the other batch are. So loss and gradients get
/// exact zeros.
///
/// Ranks are averaged as always. The mean of a batch of windows has the weight ranks / gradient_accumulation_steps, so
/// all batches count alike, however many a rank has.

/// A rank's part of the run's batches. What all ranks together get in an iteration, or in a batch of an evaluation,
/// depends on the seed and on the number of sequences, not on how many ranks and micro-steps share them.
struct BatchSource {
  Dataset const* dataset = nullptr;  ///< nullptr, for a benchmark without data: random tokens
  std::int64_t vocab_size = 50304;
  std::uint64_t seed = 0;       ///< of the run
  bool random_windows = false;  ///< nanoGPT's way: anywhere in the text, with replacement
  std::int64_t rank = 0, ranks = 1;
  std::int64_t batch_size = 1;                   ///< B: sequences of a rank's micro-step
  std::int64_t gradient_accumulation_steps = 1;  ///< batches of an iteration, of all ranks
  std::int64_t block_size = 1;                   ///< T: tokens of a sequence

  /// Sequences of an iteration, of all ranks.
  std::int64_t global_batch() const { return gradient_accumulation_steps * batch_size; }
  /// Micro-steps of each rank in an iteration.
  std::int64_t micro_steps() const { return (gradient_accumulation_steps + ranks - 1) / ranks; }
  /// Whether this rank has sequences of its own in a micro-step. See [Note: Micro-steps without sequences].
  bool has_sequences(std::int64_t micro_step) const { return turn(micro_step) < gradient_accumulation_steps; }
  /// Number, within its iteration, of the first sequence that this rank's micro-step reads.
  std::int64_t first_of(std::int64_t micro_step) const {
    return turn(micro_step) % gradient_accumulation_steps * batch_size;
  }
  /// This rank's batches in an iteration, relative to the mean over ranks.
  double share() const {
    auto const own = (gradient_accumulation_steps - rank + ranks - 1) / ranks;
    return static_cast<double>(own * ranks) / static_cast<double>(gradient_accumulation_steps);
  }

  /// See [Note: Training windows] and [Note: Documents as rows].
  /// @param inputs,targets  (B, T), row-major; targets of -1 have no loss
  /// @throws fsdp::Error if a sequence has a token outside the vocabulary
  void read_training_batch(std::int64_t iteration, std::int64_t micro_step, std::span<std::int32_t> inputs,
                           std::span<std::int32_t> targets) const {
    read_training(iteration * global_batch() + first_of(micro_step), inputs, targets);
    if (!has_sequences(micro_step)) std::fill(targets.begin(), targets.end(), -1);
  }
  /// Factor of a micro-step's mean over its (B, T) places, padding included: the mean over ranks of the sums over
  /// micro-steps is then the loss of the iteration.
  double training_weight(std::int64_t iteration) const {
    auto const* rows = dataset == nullptr ? nullptr : dataset->rows(Split::train);
    if (rows == nullptr) return static_cast<double>(ranks) / static_cast<double>(gradient_accumulation_steps);
    auto const sizes = order_sizes(*rows);
    auto const order = training_rows(sizes);
    return weight_of(*rows, iteration * global_batch(), global_batch(),
                     [&](std::int64_t number) { return training_row(*rows, order, number); });
  }

  /// Sequences of a split, in an order of windows as for training: a mean over many batches hardly depends on the draw.
  /// @param batch  number of the batch that all ranks draw together
  /// @param inputs,targets  (B, T), row-major
  /// @pre there is a data set
  void read_evaluation_batch(Split split, std::int64_t batch, std::span<std::int32_t> inputs,
                             std::span<std::int32_t> targets) const {
    auto const first = (batch * ranks + rank) * batch_size;
    if (auto const* rows = dataset->rows(split)) {
      auto const sizes = order_sizes(*rows);
      auto const order = evaluation_rows(split, sizes);
      for (std::int64_t i = 0; i < batch_size; ++i) read_row(split, order.at(first + i), i, inputs, targets);
      return;
    }
    auto const& tokens = dataset->split(split);
    WindowOrder const order(evaluation_seed(split), tokens.sizes(), block_size, ranks * batch_size);
    for (std::int64_t i = 0; i < batch_size; ++i) read(tokens, order.at(first + i), i, inputs, targets);
  }
  /// Factor of the mean of each of the batches [first_batch, first_batch + batches) of an evaluation.
  /// The mean over batches and ranks is then the loss of the evaluation.
  double evaluation_weight(Split split, std::int64_t first_batch, std::int64_t batches) const {
    auto const* rows = dataset->rows(split);
    if (rows == nullptr) return 1.0;
    auto const sizes = order_sizes(*rows);
    auto const together = ranks * batch_size;
    auto const order = evaluation_rows(split, sizes);
    return weight_of(*rows, first_batch * together, batches * together,
                     [&](std::int64_t number) { return order.at(number); }) *
           static_cast<double>(batches);
  }

 private:
  /// Number of a micro-step among all that the ranks make in an iteration.
  std::int64_t turn(std::int64_t micro_step) const { return micro_step * ranks + rank; }

  /// Reads B training sequences. @param first  number, within the run, of the first one
  void read_training(std::int64_t first, std::span<std::int32_t> inputs, std::span<std::int32_t> targets) const {
    if (dataset == nullptr) return random_tokens(first, inputs, targets);
    if (auto const* rows = dataset->rows(Split::train)) {
      auto const sizes = order_sizes(*rows);
      auto const order = training_rows(sizes);
      for (std::int64_t i = 0; i < batch_size; ++i)
        read_row(Split::train, training_row(*rows, order, first + i), i, inputs, targets);
      return;
    }
    auto const shards = dataset->train.sizes();
    WindowOrder const order(seed, shards, block_size, global_batch());
    for (std::int64_t i = 0; i < batch_size; ++i) {
      auto const number = first + i;
      if (random_windows) {
        auto const drawn =
            draw_offset(seed, Draw::window, static_cast<std::uint64_t>(number), 0, count_starts(shards, block_size));
        read(dataset->train, start_of_number(shards, block_size, drawn), i, inputs, targets);
      } else {
        read(dataset->train, order.at(number), i, inputs, targets);
      }
    }
  }
  /// Rows are visited as windows of one token are: of a text with one token more than there are rows.
  static std::vector<std::int64_t> order_sizes(RowIndex const& rows) {
    std::vector<std::int64_t> sizes(rows.sizes().begin(), rows.sizes().end());
    for (auto& size : sizes) ++size;
    return sizes;
  }
  WindowOrder training_rows(std::span<std::int64_t const> sizes) const { return {seed, sizes, 1, global_batch()}; }
  WindowOrder evaluation_rows(Split split, std::span<std::int64_t const> sizes) const {
    return {evaluation_seed(split), sizes, 1, ranks * batch_size};
  }
  std::uint64_t evaluation_seed(Split split) const {
    return mix(seed + static_cast<std::uint64_t>(split == Split::train ? Draw::train_loss : Draw::val_loss));
  }
  Window training_row(RowIndex const& rows, WindowOrder const& order, std::int64_t number) const {
    if (!random_windows) return order.at(number);
    auto row = draw_offset(seed, Draw::window, static_cast<std::uint64_t>(number), 0, rows.size());
    std::size_t shard = 0;
    for (; row >= rows.sizes()[shard]; ++shard) row -= rows.sizes()[shard];
    return {shard, row};
  }
  /// B T ranks / targets of so many sequences.
  /// @param place  Window(number of a sequence): its row
  template <class Place>
  double weight_of(RowIndex const& rows, std::int64_t first, std::int64_t count, Place const& place) const {
    std::int64_t targets = 0;
    for (auto number = first; number < first + count; ++number) {
      auto const [shard, row] = place(number);
      targets += rows.targets(shard, row, block_size);
    }
    return static_cast<double>(batch_size * block_size * ranks) / static_cast<double>(targets);
  }

  /// Reads sequence `i` of a micro-step. @throws fsdp::Error if it has a token outside the vocabulary
  void read(TokenShards const& tokens, Window const& window, std::int64_t i, std::span<std::int32_t> inputs,
            std::span<std::int32_t> targets) const {
    tokens.file(window.shard).read(window.start, vocab_size, row(inputs, i), row(targets, i));
  }
  void read_row(Split split, Window const& place, std::int64_t i, std::span<std::int32_t> inputs,
                std::span<std::int32_t> targets) const {
    auto const& rows = *dataset->rows(split);
    auto const count = static_cast<std::size_t>(rows.targets(place.shard, place.start, block_size));
    auto const in = row(inputs, i), out = row(targets, i);
    dataset->split(split)
        .file(place.shard)
        .read(rows.at(place.shard, place.start).begin, vocab_size, in.first(count), out.first(count));
    std::fill(in.begin() + static_cast<std::ptrdiff_t>(count), in.end(), 0);
    std::fill(out.begin() + static_cast<std::ptrdiff_t>(count), out.end(), -1);
  }
  std::span<std::int32_t> row(std::span<std::int32_t> batch, std::int64_t i) const {
    return batch.subspan(static_cast<std::size_t>(i * block_size), static_cast<std::size_t>(block_size));
  }
  void random_tokens(std::int64_t first, std::span<std::int32_t> inputs, std::span<std::int32_t> targets) const {
    auto const block = static_cast<std::size_t>(block_size);
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      auto const number = static_cast<std::uint64_t>(first) + i / block;
      auto const token = [&](std::size_t place) {
        return static_cast<std::int32_t>(draw_offset(seed, Draw::tokens, number, place, vocab_size));
      };
      inputs[i] = token(2 * (i % block));
      targets[i] = token(2 * (i % block) + 1);
    }
  }
};

}  // namespace transformer
