// SPDX-License-Identifier: Apache-2.0
// Description of a cluster of equal GPUs, and the time of collectives on it.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <string>
#include <string_view>

#include "fsdp/error.hpp"
#include "fsdp/step/operation.hpp"
#include "fsdp/step/simulate.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE::plan {

/// Algorithm of a collective.
enum class Algorithm : unsigned char {
  ring,  ///< the latency grows with the number of nodes
  tree,  ///< it grows with its logarithm
  nccl   ///< all_reduce: the faster of both; the others: a ring, or with one rank a node the faster of both (PAT)
};
inline constexpr std::array<std::string_view, 3> algorithm_names{"ring", "tree", "nccl"};

/// Seconds, bytes and operations per second. Bandwidths are those that a large collective reaches, in one direction,
/// for each GPU.
struct Hardware {
  int gpus_per_node = 1;
  double memory = 0;             ///< bytes of a GPU that a run may use
  double flops = 0;              ///< dense peak by the data sheet: what MFU refers to
  double efficiency = 1;         ///< fraction of `flops` that matrix products reach
  double memory_bandwidth = 0;   ///< of a GPU's memory, reached by copies
  double node_bandwidth = 0;     ///< from a GPU to others of its node
  double network_bandwidth = 0;  ///< from a GPU to other nodes
  double node_latency = 0;       ///< of one hop within a node
  double network_latency = 0;    ///< of one hop between nodes
  double launch = 0;             ///< fixed cost of a collective
  double step_overhead = 0;      ///< per step: host time that nothing overlaps
  double jitter = 0;             ///< per step and doubling of the nodes: delay of the slowest rank
  bool shared_link = true;       ///< gathers and reductions that overlap share the bandwidth: [Note: Shared links]
  Algorithm all_gather = Algorithm::nccl, reduce_scatter = Algorithm::nccl, all_reduce = Algorithm::nccl;

  int nodes(int gpus) const { return (gpus + gpus_per_node - 1) / gpus_per_node; }
};

/// The ranks of a collective: so many, `stride` ranks apart.
struct Members {
  int ranks = 1;
  int stride = 1;
  /// Number of ranks of the group in a node. The other ranks of the node run the same collective in groups of their
  /// own.
  int per_node(Hardware const& hardware) const {
    return std::clamp(hardware.gpus_per_node / std::max(stride, 1), 1, std::max(ranks, 1));
  }
};

/// Time of a collective by one algorithm, for the bytes of the whole buffer: launch + passes * (latency + bytes *
/// (ranks - 1) / ranks / bandwidth), with two passes for all_reduce. Within a node a GPU passes data on to the next
/// one; a node's part of the group shares the network bandwidth of as many GPUs. Latency by ring: (nodes - 1) hops of
/// the network and nodes * (ranks of a node - 1) in nodes; by tree: log2(nodes) hops, rounded up, and ranks of a node
/// - 1. (Thakur, Rabenseifner, Gropp: Optimization of Collective Communication Operations in MPICH, 2005.)
/// @param algorithm  ring or tree
inline Cost collective_cost(Hardware const& hardware, step::Primitive primitive, Members const& members,
                            Algorithm algorithm) {
  if (members.ranks <= 1) return {};
  auto const in_node = members.per_node(hardware), nodes = (members.ranks + in_node - 1) / in_node;
  auto const network = hardware.network_bandwidth * in_node;
  auto const bandwidth = nodes == 1     ? hardware.node_bandwidth
                         : in_node == 1 ? network
                                        : std::min(hardware.node_bandwidth, network);
  bool const ring = algorithm == Algorithm::ring;
  auto const among_nodes = ring ? nodes - 1.0 : std::ceil(std::log2(nodes));
  auto const inside_node = (ring ? double(nodes) : 1.0) * (in_node - 1);
  auto const passes = primitive == step::Primitive::all_reduce ? 2.0 : 1.0;
  return {hardware.launch + passes * (among_nodes * hardware.network_latency + inside_node * hardware.node_latency),
          passes * (members.ranks - 1) / members.ranks / bandwidth};
}

/// Adds the collective's costs by each algorithm that it may use.
inline void add_collective(Costs& costs, Hardware const& hardware, step::Primitive primitive, step::Group group,
                           Members const& members) {
  auto const algorithm = primitive == step::Primitive::all_gather       ? hardware.all_gather
                         : primitive == step::Primitive::reduce_scatter ? hardware.reduce_scatter
                                                                        : hardware.all_reduce;
  auto const add = [&](Algorithm by) {
    costs.collectives.push_back({primitive, group, collective_cost(hardware, primitive, members, by)});
  };
  if (algorithm != Algorithm::tree) add(Algorithm::ring);
  bool const chooses = primitive == step::Primitive::all_reduce || members.per_node(hardware) == 1;
  if (algorithm == Algorithm::tree || (algorithm == Algorithm::nccl && chooses)) add(Algorithm::tree);
}

/// @throws ConfigError with both numbers, if whole nodes are not used
inline void expect_whole_nodes(Hardware const& hardware, int gpus) {
  if (gpus > hardware.gpus_per_node && gpus % hardware.gpus_per_node != 0)
    fail<ConfigError>("{} GPUs are not a multiple of the {} GPUs of a node", gpus, hardware.gpus_per_node);
}

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE::plan
