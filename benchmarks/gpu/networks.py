"""The networks whose steps are timed, each with a batch of this rank's own."""

import importlib
from typing import Any

import torch
from torch import nn
from torch.nn import functional

VOCABULARY = 16384
TOKENS = 512


class Block(nn.Module):
    """A layer of a GPT."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_attention, self.norm_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.queries_keys_values = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> Any:
        batch, tokens, width = x.shape
        parts = self.queries_keys_values(self.norm_attention(x)).chunk(3, -1)
        shape = (batch, tokens, self.heads, width // self.heads)
        q, k, v = (part.view(shape).transpose(1, 2) for part in parts)
        seen = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(batch, tokens, width))
        return x + self.down(functional.gelu(self.up(self.norm_mlp(x))))


class Gpt(nn.Module):
    """110 million parameters."""

    def __init__(self, width: int = 768, layers: int = 12, heads: int = 12) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.places = nn.Embedding(TOKENS, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, x: torch.Tensor) -> Any:
        y = self.tokens(x) + self.places(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            y = block(y)
        return self.head(self.norm(y))


def make(name: str, device: str) -> Any:
    """The same on every call and rank."""
    torch.manual_seed(0)
    if name == "gpt":
        return Gpt().to(device)
    if name == "resnet50":
        model = importlib.import_module("torchvision.models").resnet50()
        return model.to(device, memory_format=torch.channels_last)
    layers = [layer for _ in range(4) for layer in (nn.Linear(256, 256), nn.ReLU())]
    return nn.Sequential(*layers).to(device)


def batch(name: str, device: str, rank: int, samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and labels."""
    torch.manual_seed(100 + rank)
    if name == "gpt":
        x = torch.randint(VOCABULARY, (samples, TOKENS), device=device)
        return x, x.roll(-1, 1).reshape(-1)
    if name == "resnet50":
        images = torch.randn(samples, 3, 224, 224, device=device)
        labels = torch.randint(1000, (samples,), device=device)
        return images.to(memory_format=torch.channels_last), labels
    return torch.randn(samples, 256, device=device), torch.randint(256, (samples,), device=device)


def loss_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor, device: str) -> torch.Tensor:
    with torch.autocast(device, dtype=torch.bfloat16):
        out = model(x)
        return functional.cross_entropy(out.reshape(-1, out.shape[-1]).float(), y)
