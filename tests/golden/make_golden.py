#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes gpt2_tiny.hpp: what PyTorch makes of a tiny GPT-2 in double precision, with either GELU. The losses, logits and
gradients of one batch, and the parameters after ten steps of SGD and of AdamW.

    pip install torch==2.15.0 numpy==2.4.6
    python make_golden.py > gpt2_tiny.hpp
    python make_golden.py --compare DIR    # whole tensors, as the test writes them; see below

A tensor is represented by its norm and 16 projections. A projection is the sum of the elements times odd numbers from
-15 to 15, which hashes of the tensor's name choose, divided by the square root of 85, their mean square. So the root mean square
of two tensors' 16 differences estimates the norm of the tensors' difference.

What --compare reads: FSDP_GOLDEN_OUT=DIR tests_nanogpt '[.golden-files]'. It prints the largest difference of whole tensors, relative
to the tensor's norm, and the same for PyTorch in fp32: what fp32 itself costs.
"""
import argparse
import pathlib
import platform

import numpy as np
import torch

import tiny_gpt2 as tiny

PROJECTIONS = 16


def arrays(activation: str, dtype: torch.dtype) -> tuple[float, dict[tuple[str, str], np.ndarray]]:
    """The first batch's loss; whole tensors in double, by kind and name. The logits are one tensor."""
    take = lambda tensor: tensor.detach().double().numpy().ravel().copy()
    model = tiny.Gpt2(activation, dtype)
    tokens, targets = tiny.batch(0)
    loss = model.loss(tokens, targets)
    loss.backward()
    found = {("logits", "logits"): take(model(tokens))}
    for name, parameter in model.named_parameters():
        found["gradient", name] = take(parameter.grad)
    for kind in ("sgd", "adamw"):
        model = tiny.Gpt2(activation, dtype)
        optimizer = tiny.optimizer_of(model, kind)
        norms = [tiny.train_step(model, optimizer, step) for step in range(tiny.STEPS)]
        assert norms[0] > 2 * tiny.CLIP, "clipping must matter"
        for name, parameter in model.named_parameters():
            found[kind, name] = take(parameter)
    return loss.item(), found


def projections(name: str, values: np.ndarray) -> np.ndarray:
    bits = tiny.hashes(name + " projections", len(values))
    digits = [(bits >> np.uint64(4 * k)) & np.uint64(15) for k in range(PROJECTIONS)]
    return np.array([np.dot(2.0 * d.astype(np.float64) - 15.0, values) for d in digits]) / 85.0**0.5


def write_header() -> None:
    print("// SPDX-License-Identifier: Apache-2.0")
    print("// A tiny GPT-2 in PyTorch, in double precision: norms and projections of its tensors. Written by make_golden.py with")
    print(f"// Python {platform.python_version()}, torch {torch.__version__}, numpy {np.__version__}; do not edit.\n// clang-format off")
    print('#pragma once\n\n#include "tests/golden/formulas.hpp"\n\nnamespace golden {\n')
    rows, losses = [], {}
    for activation in tiny.APPROXIMATE:
        losses[activation], found = arrays(activation, torch.float64)
        for (kind, name), values in found.items():
            numbers = ", ".join(f"{p:.10g}" for p in projections(name, values))
            rows.append(f'    {{"{activation}", "{kind}", "{name}", {{{np.linalg.norm(values):.10g}, {{{numbers}}}}}}},')
    for activation, loss in losses.items():
        print(f"inline constexpr double {activation}_loss = {loss:.12g};")
    print("\ninline constexpr Row rows[] = {")
    print("\n".join(rows))
    print("};\n\n}  // namespace golden")


def compare(folder: pathlib.Path) -> None:
    for activation in tiny.APPROXIMATE:
        _, exact = arrays(activation, torch.float64)
        _, single = arrays(activation, torch.float32)
        worst: dict[str, tuple[float, float, str]] = {}
        for (kind, name), values in exact.items():
            read = np.fromfile(folder / f"{activation}.{kind}.{name}.f32", dtype="<f4").astype(np.float64)
            assert read.shape == values.shape, f"{kind} of {name}: {read.shape} elements, not {values.shape}"
            ours, theirs = (np.linalg.norm(t - values) / np.linalg.norm(values) for t in (read, single[kind, name]))
            seen = worst.get(kind, (0.0, 0.0, ""))
            worst[kind] = (max(ours, seen[0]), max(theirs, seen[1]), name if ours >= seen[0] else seen[2])
        for kind, (ours, theirs, name) in worst.items():
            print(f"{activation:9} {kind:9} fsdp in fp32 {ours:.2e} ({name}), torch in fp32 {theirs:.2e}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compare", metavar="DIR", type=pathlib.Path)
    options = parser.parse_args()
    if options.compare:
        compare(options.compare)
    else:
        write_header()
