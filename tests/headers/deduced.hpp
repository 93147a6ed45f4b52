// SPDX-License-Identifier: Apache-2.0
// Template arguments are deduced by every compiler, from as few arguments as a constructor takes. Seen behind all public headers.
#pragma once

namespace deduced {

using Communicator = fsdp::local::Communicator<fsdp::host::Device>;
using Mesh = fsdp::Mesh<Communicator>;
using Engine = fsdp::Engine<Communicator>;
template <class T>
T& a();
template <class Deduced, class Expected>
concept Is = std::is_same_v<Deduced, Expected>;

static_assert(Is<decltype(fsdp::Mesh{std::declval<Communicator>()}), Mesh>);
static_assert(Is<decltype(fsdp::Engine{a<Mesh>(), fsdp::FullShard{}}), Engine>);
static_assert(Is<decltype(fsdp::Engine{a<Mesh>(), fsdp::FullShard{}, {.prefetch = 2}}), Engine>);
static_assert(Is<decltype(fsdp::Engine{a<Mesh>(), fsdp::FullShard{}, fsdp::Fp32{}}), Engine>);
static_assert(Is<decltype(fsdp::Sgd{a<Engine>()}), fsdp::Sgd<Engine>>);
static_assert(Is<decltype(fsdp::Sgd{a<Engine>(), {.lr = 1.0f}}), fsdp::Sgd<Engine>>);
static_assert(Is<decltype(fsdp::AdamW{a<Engine>()}), fsdp::AdamW<Engine>>);
static_assert(Is<decltype(fsdp::AdamW{a<Engine>(), {.lr = 1.0f}}), fsdp::AdamW<Engine>>);
static_assert(Is<decltype(fsdp::Muon{a<Engine>(), fsdp::TensorSelection::all()}), fsdp::Muon<Engine>>);
static_assert(Is<decltype(fsdp::GradScaler{a<Engine>()}), fsdp::GradScaler<Engine>>);
static_assert(Is<decltype(fsdp::GradScaler{a<Engine>(), {.init_scale = 2.0f}}), fsdp::GradScaler<Engine>>);
static_assert(Is<decltype(fsdp::Ema{a<Engine>()}), fsdp::Ema<Engine>>);
static_assert(Is<decltype(fsdp::Ema{a<Engine>(), 0.9f}), fsdp::Ema<Engine>>);
static_assert(Is<decltype(fsdp::Ema{a<Engine>(), 0.9f, "fast"}), fsdp::Ema<Engine>>);
static_assert(Is<decltype(fsdp::HeldUse{a<Engine>()}), fsdp::HeldUse<Engine>>);

}  // namespace deduced
