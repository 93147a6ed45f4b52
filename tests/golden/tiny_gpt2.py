# SPDX-License-Identifier: Apache-2.0
"""A tiny GPT-2 in plain PyTorch, with weights and batches by formula: what make_golden.py and load_optimizer_state.py
share. tests/golden/formulas.hpp has the same formulas for C++."""
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

LAYERS, HEADS, WIDTH, BLOCK, VOCABULARY = 2, 4, 64, 32, 257
SEQUENCES, LENGTH, STEPS = 6, 20, 10  # of a batch over all ranks; of a run
APPROXIMATE = {"gelu": "none", "gelu_new": "tanh"}  # the names of F.gelu

# Powers of two, or numbers that fp32 rounds by less than 1e-7 of themselves.
DECAY, CLIP = 0.125, 1.0
SGD_RATE, ADAMW_RATE, BETAS, EPS = 0.5, 2.0**-7, (0.9, 0.95), 1e-3


def hashes(text: str, count: int, first: int = 0) -> np.ndarray:
    """64 bits for each of the numbers first, first + 1, ...: FNV-1a of the text, then a step and the mixing of
    splitmix64 (Steele, Lea and Flood, OOPSLA 2014) for each number."""
    start = 0xCBF29CE484222325
    for byte in text.encode():
        start = (start ^ byte) * 0x100000001B3 % 2**64
    with np.errstate(over="ignore"):
        z = np.uint64(start) + np.arange(first + 1, first + count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def initial(name: str, count: int) -> np.ndarray:
    """Multiples of 2^-18 that fp32 holds exactly: matrices within 1/4, biases within 1/8, weights of a LayerNorm within
    1/8 of 1."""
    norm = "ln_" in name and name.endswith("weight")
    matrix = name.endswith("weight") and not norm
    values = ((hashes(name, count) >> np.uint64(48)).astype(np.float64) - 2**15) / 2**15
    return values * (2.0**-2 if matrix else 2.0**-3) + (1.0 if norm else 0.0)


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and targets, (SEQUENCES, LENGTH) each, of a step."""
    count = SEQUENCES * LENGTH
    ids = [hashes(text, count, step * count) % np.uint64(VOCABULARY) for text in ("tokens", "targets")]
    return tuple(torch.from_numpy(i.astype(np.int64)).reshape(SEQUENCES, LENGTH) for i in ids)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.c_attn = nn.Linear(WIDTH, 3 * WIDTH)
        self.c_proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        batch_size, length, _ = x.shape
        split = lambda t: t.view(batch_size, length, HEADS, WIDTH // HEADS).transpose(1, 2)
        query, key, value = (split(t) for t in self.c_attn(x).chunk(3, dim=-1))
        scores = query @ key.transpose(-2, -1) / (WIDTH // HEADS) ** 0.5
        later = torch.ones(length, length, dtype=torch.bool).triu(1)
        mixed = scores.masked_fill(later, float("-inf")).softmax(dim=-1) @ value
        return self.c_proj(mixed.transpose(1, 2).reshape(batch_size, length, WIDTH))


class Mlp(nn.Module):
    def __init__(self, activation):
        super().__init__()
        self.approximate = APPROXIMATE[activation]
        self.c_fc = nn.Linear(WIDTH, 4 * WIDTH)
        self.c_proj = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return self.c_proj(F.gelu(self.c_fc(x), approximate=self.approximate))


class Block(nn.Module):
    def __init__(self, activation):
        super().__init__()
        self.ln_1, self.attn = nn.LayerNorm(WIDTH, eps=1e-5), Attention()
        self.ln_2, self.mlp = nn.LayerNorm(WIDTH, eps=1e-5), Mlp(activation)

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class Gpt2(nn.Module):
    """Parameters have the names of GPT-2's checkpoints; the head is the table of tokens."""

    def __init__(self, activation: str, dtype: torch.dtype = torch.float64):
        super().__init__()
        self.transformer = nn.ModuleDict({
            "wte": nn.Embedding(VOCABULARY, WIDTH), "wpe": nn.Embedding(BLOCK, WIDTH),
            "h": nn.ModuleList(Block(activation) for _ in range(LAYERS)), "ln_f": nn.LayerNorm(WIDTH, eps=1e-5)})
        self.to(dtype)
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                parameter.copy_(torch.from_numpy(initial(name, parameter.numel())).reshape(parameter.shape))

    def forward(self, tokens):
        parts = self.transformer
        x = parts["wte"](tokens) + parts["wpe"](torch.arange(tokens.shape[1]))
        for block in parts["h"]:
            x = block(x)
        return F.linear(parts["ln_f"](x), parts["wte"].weight)

    def loss(self, tokens, targets):
        return F.cross_entropy(self(tokens).flatten(0, 1), targets.flatten())


def optimizer_of(model: Gpt2, kind: str) -> torch.optim.Optimizer:
    """SGD with an L2 penalty, or AdamW; tensors of two dimensions decay, the others do not."""
    groups = [{"params": [p for p in model.parameters() if p.dim() >= 2], "weight_decay": DECAY},
              {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0}]
    if kind == "sgd":
        return torch.optim.SGD(groups, lr=SGD_RATE)
    return torch.optim.AdamW(groups, lr=ADAMW_RATE, betas=BETAS, eps=EPS)


def train_step(model: Gpt2, optimizer: torch.optim.Optimizer, step: int) -> float:
    """@return the norm of the gradients before they are clipped"""
    optimizer.zero_grad()
    model.loss(*batch(step)).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
    optimizer.step()
    return norm.item()
