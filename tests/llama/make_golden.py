#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes golden.hpp: what transformers makes of small Llamas in fp32. The losses of twenty steps of AdamW, the gradients
of the first, and a text decoded greedily; losses and gradients in bf16; the same with adapters of peft, and with frozen
layers.

    pip install torch==2.15.0 transformers==5.24.0 peft==0.21.2 numpy==2.4.6
    python make_golden.py > golden.hpp

Weights and tokens are formulas, which tests/llama/golden_run.hpp has too. A tensor is represented by its norm and 16
projections: tests/golden/make_golden.py says what they are.
"""
import pathlib
import platform
import sys

import numpy as np
import peft
import torch
import torch.nn.functional as F
import transformers

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "golden"))
from tiny_gpt2 import hashes  # noqa: E402

SEQUENCES, LENGTH, STEPS = 4, 24, 20  # of a batch over all ranks; of a run
RATE, BETAS, DECAY, CLIP = 1e-3, (0.9, 0.95), 0.1, 1.0
RANK, ALPHA = 8, 16
PROMPT, NEW = 6, 14
PROJECTIONS = 16
NONE = {"rope_type": "default", "rope_theta": 10000.0}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 16}
# hidden, intermediate, layers, heads, kv heads, head size, vocabulary, rope, tied
SHAPES = {
    "grouped": (64, 172, 2, 8, 4, 8, 300, NONE, True),
    "nine_three": (576, 384, 2, 9, 3, 64, 131, {**NONE, "rope_theta": 100000.0}, True),
    "eight_one": (512, 352, 2, 8, 1, 64, 128, NONE, False),
    "four_four": (512, 224, 2, 4, 4, 128, 140, {**NONE, "rope_theta": 1e6}, False),
    "wide_heads": (96, 120, 2, 6, 2, 32, 97, {**NONE, "rope_theta": 500000.0}, False),
    "llama3": (48, 130, 2, 6, 2, 8, 200, LLAMA3, False),
}
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def initial(name: str, count: int, width: int) -> np.ndarray:
    """Multiples of 2^-20 that fp32 holds exactly: weights of a norm within 1/8 of 1, matrices of narrow models within
    1/8, of others within 1/16, an adapter's B within 1/32."""
    norm = "norm" in name
    scale = 2.0**-3 if norm or width < 128 else 2.0**-4
    if "lora_B" in name:
        scale = 2.0**-5
    values = ((hashes(name, count) >> np.uint64(48)).astype(np.float64) - 2**15) / 2**15
    return values * scale + (1.0 if norm else 0.0)


def text(step: int, vocabulary: int) -> torch.Tensor:
    """(SEQUENCES, LENGTH + 1) tokens; those at odd places are half of the one before."""
    count = SEQUENCES * (LENGTH + 1)
    ids = (hashes("text", count, step * count) % np.uint64(vocabulary)).astype(np.int64).reshape(SEQUENCES, LENGTH + 1)
    ids[:, 1::2] = ids[:, 0:-1:2] // 2
    return torch.from_numpy(ids)


def our_name(name: str) -> str:
    return name.replace("base_model.model.", "", 1).replace(".base_layer.", ".").replace(".default.", ".")


def build(shape, adapters: list[str] | None = None, frozen: int = 0):
    hidden, intermediate, layers, heads, kv_heads, size, vocabulary, rope, tied = shape
    config = transformers.LlamaConfig(
        hidden_size=hidden, intermediate_size=intermediate, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=kv_heads, head_dim=size, vocab_size=vocabulary, rope_parameters=dict(rope),
        tie_word_embeddings=tied, rms_norm_eps=1e-5, max_position_embeddings=64, attn_implementation="eager",
        bos_token_id=None, eos_token_id=None, pad_token_id=None)
    model = transformers.LlamaForCausalLM(config).float()
    if adapters is not None:
        model = peft.get_peft_model(model, peft.LoraConfig(
            r=RANK, lora_alpha=ALPHA, lora_dropout=0.0, target_modules=adapters, task_type="CAUSAL_LM"))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            values = initial(our_name(name), parameter.numel(), hidden)
            parameter.copy_(torch.from_numpy(values).reshape(parameter.shape))
    for name, parameter in model.named_parameters():
        if frozen and ("embed_tokens" in name or any(f"layers.{i}." in name for i in range(frozen))):
            parameter.requires_grad_(False)
    return model.train()


def loss_of(model, step: int, vocabulary: int):
    ids = text(step, vocabulary)
    logits = model(input_ids=ids[:, :-1], use_cache=False).logits
    return F.cross_entropy(logits.to(torch.promote_types(logits.dtype, torch.float32)).flatten(0, 1), ids[:, 1:].flatten())


def gradients_of(model, vocabulary: int) -> dict[str, np.ndarray]:
    model.zero_grad()
    loss_of(model, 0, vocabulary).backward()
    return {our_name(n): p.grad.double().numpy().ravel().copy() for n, p in model.named_parameters() if p.requires_grad}


def train(model, vocabulary: int) -> list[float]:
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW([{"params": [p for p in trained if p.dim() >= 2], "weight_decay": DECAY},
                                   {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0}],
                                  lr=RATE, betas=BETAS, eps=1e-8)
    losses = []
    for step in range(STEPS):
        loss = loss_of(model, step, vocabulary)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, CLIP)
        optimizer.step()
        losses.append(loss.item())
    return losses


def reproducible(shape, **how) -> list[float]:
    """The losses in fp32. A run says something only if rounding does not move them: in double they are the same, within half
    of the test's tolerance."""
    losses, exact = train(build(shape, **how), shape[6]), train(build(shape, **how).double(), shape[6])
    assert max(abs(a - b) for a, b in zip(losses, exact)) < 2.5e-6, (shape, how)
    return losses


def decode(model, vocabulary: int) -> list[int]:
    ids = text(0, vocabulary)[:1, :PROMPT]
    with torch.no_grad():
        for _ in range(NEW):
            logits = model(input_ids=ids, use_cache=False).logits[0, -1]
            best = logits.topk(2).values
            assert best[0] - best[1] > 1e-4, "the choice must not depend on rounding"
            ids = torch.cat([ids, logits.argmax().reshape(1, 1)], 1)
    return ids[0].tolist()


def projections(name: str, values: np.ndarray) -> np.ndarray:
    bits = hashes(name + " projections", len(values))
    digits = [(bits >> np.uint64(4 * k)) & np.uint64(15) for k in range(PROJECTIONS)]
    return np.array([np.dot(2.0 * d.astype(np.float64) - 15.0, values) for d in digits]) / 85.0**0.5


def numbers(values, digits: int = 9) -> str:
    return ", ".join(f"{v:.{digits}g}" for v in values)


class Header:
    def __init__(self):
        self.runs, self.rows = [], []

    def run(self, shape: str, kind: str, losses: list[float]):
        self.runs.append(f'    {{"{shape}", "{kind}", {{{numbers(losses)}}}}},')

    def gradients(self, shape: str, kind: str, gradients: dict[str, np.ndarray]):
        for name, values in gradients.items():
            prints = numbers(projections(name, values), 8)
            self.rows.append(f'    {{"{shape}", "{kind}", "{name}", {{{np.linalg.norm(values):.9g}, {{{prints}}}}}}},')


def main() -> None:
    torch.set_num_threads(1)
    header, texts = Header(), []
    for name, shape in SHAPES.items():
        vocabulary = shape[6]
        model = build(shape)
        texts.append(f'    {{"{name}", {{{", ".join(map(str, decode(model, vocabulary)))}}}}},')
        header.gradients(name, "full", gradients_of(model, vocabulary))
        header.run(name, "full", reproducible(shape))
        if name in ("grouped", "llama3"):
            narrow = build(shape).bfloat16()
            header.gradients(name, "bf16", gradients_of(narrow, vocabulary))
            header.run(name, "bf16", [loss_of(narrow, step, vocabulary).item() for step in range(STEPS)])
            exact = build(shape)
            header.run(name, "untrained", [loss_of(exact, step, vocabulary).item() for step in range(STEPS)])
            adapted = build(shape, TARGETS)
            header.gradients(name, "adapters", gradients_of(adapted, vocabulary))
            header.run(name, "adapters", reproducible(shape, adapters=TARGETS))
            some = ["q_proj", "v_proj", "up_proj"]
            header.run(name, "some_adapters", reproducible(shape, adapters=some))
            frozen = build(shape, frozen=1)
            header.gradients(name, "frozen", gradients_of(frozen, vocabulary))
            header.run(name, "frozen", reproducible(shape, frozen=1))
    print("// SPDX-License-Identifier: Apache-2.0")
    print("// Small Llamas in transformers, in fp32: losses, norms and projections of gradients, texts. Written by")
    print(f"// make_golden.py with Python {platform.python_version()}, torch {torch.__version__}, transformers")
    print(f"// {transformers.__version__}, peft {peft.__version__}, numpy {np.__version__}; do not edit.\n// clang-format off")
    print('#pragma once\n\n#include "tests/llama/golden_run.hpp"\n\nnamespace llama_golden {\n')
    for kind, values in (("Losses losses", header.runs), ("Row rows", header.rows), ("Text texts", texts)):
        print(f"inline constexpr {kind}[] = {{")
        print("\n".join(values))
        print("};\n")
    print("}  // namespace llama_golden")


if __name__ == "__main__":
    main()
