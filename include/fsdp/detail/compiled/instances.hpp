// SPDX-License-Identifier: Apache-2.0
// Template instances that fsdp::compiled contains: a communicator, and engines over it.
// [Note: Compiled once] Every file that includes the engine compiles it for itself. In a target that links
// fsdp::compiled they see `extern template` instead for what one file more of that target has (compiled/host.cpp):
// ranks as threads on the host, in fp32; fsdp::compiled_mpi has MPI's processes. Other combinations are compiled as
// without it. Modules are the user's, and what depends on their types stays in their files. compiled/checkpoint.cpp has
// the functions without template parameters that read and write files, which other files only declare
// (FSDP_CHECKPOINT_BODIES). These files are compiled with the flags of the target, so that their arithmetic is that of
// the target's other files.
//
// `extern template` does not cover inline functions: compilers still instantiate a member function that is defined in
// its class, with all that it calls. One that is defined behind its class, without `inline`, is not instantiated. So
// functions of these classes that user code calls, and that call much, are defined behind their class.
#pragma once

#include <cstddef>

#include "fsdp/fsdp.hpp"

/// A communicator and its collectives of what an fp32 engine sends.
/// @param how  `extern template` or `template`
/// @param C    the communicator
#define FSDP_COMMUNICATOR_INSTANCES(how, C)                                                \
  how class C;                                                                             \
  how ::fsdp::Ticket C::all_gather(Stream&, float const*, float*, std::size_t, Label);     \
  how ::fsdp::Ticket C::reduce_scatter(Stream&, float const*, float*, std::size_t, Label); \
  how ::fsdp::Ticket C::all_reduce(Stream&, float const*, float*, std::size_t, Label);     \
  how ::fsdp::Ticket C::all_reduce(Stream&, double const*, double*, std::size_t, Label);   \
  how ::fsdp::Ticket C::broadcast(Stream&, float*, std::size_t, int, Label);

/// Templates of an engine that depend on the device only.
/// @param D  the device
/// @param P  the precision
#define FSDP_DEVICE_INSTANCES(how, D, P)                     \
  how class FlatParam<P>;                                    \
  how class detail::DeclaredUnits<P>;                        \
  how class detail::Declaration<P>;                          \
  how struct detail::TensorDeclarer<detail::Declaration<P>>; \
  how class detail::Streams<D>;                              \
  how class TraceHook<D>;                                    \
  how class Tracer<D>;

/// Engines over a communicator, and their optimizers.
#define FSDP_ENGINE_INSTANCES(how, C, P)                                        \
  how class Mesh<C>;                                                            \
  how class detail::ShardStorage<C, P>;                                         \
  how class detail::Waits<C>;                                                   \
  how class detail::Executor<C, P>;                                             \
  how class step::Passes<detail::Executor<C, P>>;                               \
  how struct detail::EngineCore<C, P>;                                          \
  how class detail::OpenUse<detail::EngineCore<C, P>>;                          \
  how class EvaluationScope<detail::EngineCore<C, P>>;                          \
  how class detail::EngineTraces<Engine<C, P>>;                                 \
  how class Engine<C, P>;                                                       \
  how class Shards<Engine<C, P>>;                                               \
  how class AdoptedUnit<Engine<C, P>>;                                          \
  how class GradNorm<Engine<C, P>>;                                             \
  how GradNorm<Engine<C, P>> clip_grad_norm(Engine<C, P>&, float, ClipOptions); \
  how class OptimizerState<Engine<C, P>, float>;                                \
  how class AdamW<Engine<C, P>, float>;                                         \
  how class Sgd<Engine<C, P>>;
