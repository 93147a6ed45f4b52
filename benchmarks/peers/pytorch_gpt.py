# SPDX-License-Identifier: Apache-2.0
"""nanoGPT's GPT-2 in PyTorch, for benchmarks: pytorch_peer.py here, and benchmarks/step/pytorch_step.py.

No biases, no dropout, exact GELU, the head is the token table, attention by scaled_dot_product_attention; AdamW that
decays tensors of two dimensions.
"""
import torch
from torch import nn
from torch.nn import functional as F


class Layer(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm_1 = nn.LayerNorm(width, bias=False)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.mix = nn.Linear(width, width, bias=False)
        self.norm_2 = nn.LayerNorm(width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x):
        batch, length, width = x.shape
        packed = self.qkv(self.norm_1(x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = packed.permute(2, 0, 3, 1, 4).unbind(0)  # each (batch, heads, length, head size)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.mix(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class Gpt(nn.Module):
    def __init__(self, layers, heads, width, block, vocabulary):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(block, width)
        self.layers = nn.ModuleList(Layer(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width, bias=False)
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                residual = name.endswith(("mix.weight", "down.weight"))
                nn.init.normal_(weight, std=0.02 / (2 * layers) ** 0.5 if residual else 0.02)

    def forward(self, ids, targets):
        x = self.tokens(ids) + self.positions.weight[: ids.shape[1]]
        for layer in self.layers:
            x = layer(x)
        logits = F.linear(self.norm(x), self.tokens.weight)  # the head is the token table
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def adamw(model, learning_rate, fused):
    """AdamW with nanoGPT's betas and decay."""
    decayed = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=learning_rate, betas=(0.9, 0.95), fused=fused)
