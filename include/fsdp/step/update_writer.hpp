// SPDX-License-Identifier: Apache-2.0
// Operations of norms and updates, which run between passes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>

#include "fsdp/algorithm.hpp"
#include "fsdp/step/operation_writer.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE::detail {

/// [Note: Offloading] Moments, master shards and gradient shards may each lie in host memory. The device has two
/// staging slots of the size of the largest unit; units that train take turns in them. Before a unit is updated, the
/// copy stream is told to fetch the next unit's state, so that it comes while this unit is updated. After the update
/// the state is stored. If masters are offloaded, the device keeps a shard in the parameters' type: gathers read it,
/// and each update writes it. A gradient shard is stored when its reduction is complete; further micro-steps fetch it,
/// add to it and store it again. Norms read it in host memory.
class UpdateWriter : protected OperationWriter {
 protected:
  using OperationWriter::OperationWriter;

  /// Assigns the staging slots in turn to units that train.
  [[gnu::cold]] void place_staged() {
    auto& p = program_;
    std::uint32_t turn = 0;
    for (std::size_t u = 0; u < p.units.size(); ++u) {
      auto& unit = p.units[u];
      if (!unit.trains()) continue;
      unit.staging_slot = turn++ % 2;
      if (input_.units[u].offloads_masters) p.staged_masters = std::max(p.staged_masters, unit.shard() * fp32);
      if (input_.offload.gradients) p.staged_gradients = std::max(p.staged_gradients, unit.shard() * fp32);
    }
  }
  [[gnu::cold]] void write_updates(std::uint32_t u) {
    auto& p = program_;
    auto const& unit = p.units[u];
    auto const none = [&](Operations& to, Primitive primitive) { append(to, primitive, StreamKind::compute, u, {}); };
    none(p.fetches, Primitive::fetch);
    none(p.gradient_fetches, Primitive::fetch);
    none(p.stores, Primitive::store);
    none(p.reads, Primitive::norm);
    if (!unit.trains()) {
      none(p.norms, Primitive::norm);
      if (unit.empty()) return none(p.updates, Primitive::update);
      // Updates serve imports too, which follow passes of all kinds.
      append(p.updates, Primitive::update, StreamKind::compute, u, {adds(p.buffers.of_unit(Pool::master, u))}).records =
          any_facts;
      return;
    }
    auto const shard = unit.shard();
    auto const master = adds(p.buffers.of_unit(Pool::master, u));
    append(p.norms, Primitive::norm, StreamKind::compute, u, {reads(gradient_shard(u))}).moving(shard, 0);
    if (waits_by_unit() && input_.zeros_for_absent)
      append(p.absent, Primitive::zero, StreamKind::compute, u, {writes(gradient_shard(u))})
          .moving(shard, shard * fp32)
          .unless_begun = true;
    bool const offloads = input_.offload.moments || input_.units[u].offloads_masters;
    auto const home = p.buffers.of_unit(Pool::offloaded, u), staged = Buffers::staged(Pool::staged, unit.staging_slot);
    auto const moments = adds(offloads ? staged : p.buffers.of_unit(Pool::moments, u));
    append(p.updates, Primitive::update, StreamKind::compute, u, {reads(gradient_on_device(u)), master, moments})
        .moving(shard, shard * fp32);
    if (input_.offload.gradients) {
      p.gradient_fetches.pop_back();
      move_gradient(p.gradient_fetches, Primitive::fetch, u, any_facts);
    }
    if (!offloads) return;
    // The program does not know the optimizers: moments are counted as AdamW's in fp32.
    auto const moved = shard * fp32 * ((input_.units[u].offloads_masters ? 1 : 0) + (input_.offload.moments ? 2 : 0));
    auto const replace = [&](Operations& to, Primitive primitive, StreamKind stream,
                             std::initializer_list<step::Access> accesses) {
      to.back() = step::make_operation(primitive, stream, u, accesses);
      to.back().moving(shard, moved).records = any_facts;  // for imports, and readers of masters
    };
    replace(p.fetches, Primitive::fetch, StreamKind::copy, {reads(home), writes(staged)});
    replace(p.stores, Primitive::store, StreamKind::copy, {reads(staged), writes(home)});
    if (input_.units[u].offloads_masters) replace(p.reads, Primitive::norm, StreamKind::compute, {reads(home)});
  }
};

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE::detail
