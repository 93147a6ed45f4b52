#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Loads a sharded checkpoint of fsdp::save into PyTorch, takes the next step of AdamW, and compares it with ours.

    pip install torch==2.15.0 numpy==2.4.6 safetensors==0.8.0
    FSDP_GOLDEN_OUT=DIR tests_nanogpt '[.golden-files]'    # step-10 and step-11 of three ranks, for each GELU
    python load_optimizer_state.py DIR

Prints, for parameters and both moments, the largest difference of a tensor from ours at step 11, relative to the norm of the
tensor, and of what the step has changed in it. Exits with 1 where the first is above 1e-6.
"""
import argparse
import json
import pathlib
import sys

import numpy as np
import torch
from safetensors import safe_open

import tiny_gpt2 as tiny


def read_checkpoint(folder: pathlib.Path) -> tuple[dict[str, dict[str, np.ndarray]], int]:
    """@return arrays ("parameters", "exp_avg", ...) of whole tensors by name, and the steps that the optimizer has taken"""
    manifest = json.loads((folder / "checkpoint.json").read_text())
    shapes = {tensor["name"]: tensor["shape"] for tensor in manifest["tensors"]}
    arrays = {array["name"]: {name: np.full(np.prod(shape, dtype=int), np.nan, np.float32) for name, shape in shapes.items()}
              for array in manifest["arrays"]}
    for file in manifest["files"]:
        slices = json.loads((folder / (file["name"] + ".json")).read_text())["slices"]
        with safe_open(folder / file["name"], framework="np") as tensors:
            for part in slices:
                array, name, first, count = (part[key] for key in ("array", "tensor", "first", "count"))
                key = name if array == "parameters" else f"{array}/{name}"
                arrays[array][name][first : first + count] = tensors.get_tensor(key).ravel()
    for of_array in arrays.values():
        for name, values in of_array.items():
            assert not np.isnan(values).any(), f"elements of '{name}' are in no rank's file"
            of_array[name] = values.reshape(shapes[name])
    return arrays, manifest["optimizer"]["steps"]


def load(folder: pathlib.Path, activation: str) -> tuple[tiny.Gpt2, torch.optim.Optimizer]:
    arrays, steps = read_checkpoint(folder)
    model = tiny.Gpt2(activation, torch.float32)
    model.load_state_dict({name: torch.from_numpy(values) for name, values in arrays["parameters"].items()})
    optimizer = tiny.optimizer_of(model, "adamw")
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    in_order = [names[id(p)] for group in optimizer.param_groups for p in group["params"]]  # as state_dict numbers them
    state = optimizer.state_dict()
    state["state"] = {
        number: {"step": torch.tensor(float(steps)),
                 "exp_avg": torch.from_numpy(arrays["exp_avg"][name]),
                 "exp_avg_sq": torch.from_numpy(arrays["exp_avg_sq"][name])}
        for number, name in enumerate(in_order)}
    optimizer.load_state_dict(state)
    return model, optimizer


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", metavar="DIR", type=pathlib.Path)
    folder = parser.parse_args().folder
    agree = True
    for activation in tiny.APPROXIMATE:
        before, steps = read_checkpoint(folder / activation / f"step-{tiny.STEPS}")
        model, optimizer = load(folder / activation / f"step-{tiny.STEPS}", activation)
        tiny.train_step(model, optimizer, steps)
        after, steps_after = read_checkpoint(folder / activation / f"step-{tiny.STEPS + 1}")
        assert steps_after == steps + 1
        for array, tensors in after.items():
            worst = of_change = 0.0
            for name, parameter in model.named_parameters():
                theirs = parameter.detach() if array == "parameters" else optimizer.state[parameter][array]
                apart = np.linalg.norm(theirs.numpy().astype(np.float64) - tensors[name])
                worst = max(worst, apart / np.linalg.norm(tensors[name]))
                of_change = max(of_change, apart / np.linalg.norm(tensors[name].astype(np.float64) - before[array][name]))
            agree = agree and worst <= 1e-6
            print(f"{activation:9} {array:11} {worst:.2e} of the tensor, {of_change:.2e} of the step's change")
    return 0 if agree else 1


if __name__ == "__main__":
    sys.exit(main())
