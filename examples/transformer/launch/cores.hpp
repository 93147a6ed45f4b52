// SPDX-License-Identifier: Apache-2.0
// Chooses the threads of a rank on the host: its part of the cores that its machine gives to the run.
#pragma once

#include <filesystem>
#include <optional>
#include <vector>

namespace transformer {

/// The cores that this process may run on, by number, as taskset, a container or mpirun's binding leaves them.
std::vector<int> allowed_cores();

/// The processor time that control groups allow this process, in cores; nullopt: no limit.
/// @param root  where proc and sys/fs/cgroup are: "/", but for tests
std::optional<double> processor_quota(std::filesystem::path const& root = "/");

/// A rank's part of its machine: cores that several ranks may run on are divided over them, and so is the quota, which
/// is taken for one that they share.
/// @param cores  of every rank on the machine, the cores that it may run on
/// @param rank   index in `cores`
/// @return at least 1
int part_of_cores(std::vector<std::vector<int>> const& cores, std::size_t rank, std::optional<double> quota);

}  // namespace transformer
