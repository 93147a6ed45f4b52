// SPDX-License-Identifier: Apache-2.0
// The parts of preparation that do not depend on the model.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "fsdp/checkpoint.hpp"
#include "fsdp/snapshots.hpp"
#include "transformer/data/dataset.hpp"
#include "transformer/math/peak.hpp"
#include "transformer/run/data_mark.hpp"
#include "transformer/run/table.hpp"
#include "transformer/tokenizer/tokenizer.hpp"
#include "transformer/training/state.hpp"
#include "transformer/training/whole_checkpoints.hpp"

namespace transformer {

/// The result of preparation without the model.
struct Prepared {
  Settings settings;  ///< the job's, and those of a run that is resumed
  std::optional<Dataset> dataset;
  std::optional<RunState> resumed;
  std::optional<fsdp::FoundSnapshot> snapshot;       ///< that `resumed` is the state of; nullopt: a checkpoint
  std::optional<ChosenRun> on_disk;                  ///< what out_dir has, if a snapshot was looked for
  bool keeps_snapshots = false;                      ///< those that are there belong to this run
  std::string base;                                  ///< RunState::base
  std::string origin;                                ///< RunState::origin
  std::string vocabulary;                            ///< checksum of what the data's tokens are; empty: not known
  std::shared_ptr<Tokenizer const> tokenizer;        ///< the data's; null: nobody has opened it
  RunData data;                                      ///< tells the data's tokens apart from others
  std::vector<std::string> lines;                    ///< to print when training starts
  std::shared_ptr<fsdp::checkpoint::FileLock> lock;  ///< rank 0's, of out_dir, while it trains there
  bool has_out_dir = false;                          ///< rank 0 holds out_dir, and may train there
  Peak peak;  ///< of all ranks together; the source is known to the ranks that looked it up, rank 0 among them
};

/// Compares the vocabulary of the data with that of the model that training begins with: the data may have fewer
/// tokens.
/// @param vocab_size  the model's
/// @throws fsdp::ConfigError if they have more, or others than those that a resumed run has been trained on
void expect_vocabulary(Prepared const& ready, std::int64_t vocab_size, std::filesystem::path const& from);

/// @throws fsdp::ConfigError if a file of the data is shorter than a row
void expect_long_files(Prepared const& ready);

/// A description of this rank's data, which ranks compare, a line each: the tokens of both splits, by
/// their number and samples of them, the vocabulary, and the tokenizer's files. No paths and no times. Empty without a
/// data set.
/// @throws fsdp::ConfigError if a tokenizer's file cannot be read
std::string data_text(Prepared const& ready);
/// @param mine,first  data_text() of this rank and of rank 0
/// @throws fsdp::ConfigError naming the first line that differs: the machines have other files under the same names
void expect_same_data(Settings const& settings, std::string const& mine, std::string const& first, int rank);

/// Before the run in out_dir is read, at a start that goes on with it: waits for its lock, for up to two minutes. After
/// the loss of a machine, a server of NFS keeps that machine's locks until their lease expires. Rank 0.
/// @throws fsdp::ResourceError if another run is still training there
void wait_for_out_dir(Prepared& ready);

/// Holds out_dir for this run. Rank 0.
/// @throws fsdp::ResourceError if another run is training there
/// @throws fsdp::ConfigError if it holds another run, which this one would destroy, or files of something else
void take_out_dir(Prepared& ready);

}  // namespace transformer
