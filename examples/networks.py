"""The networks that several examples train. Nothing here knows of hvdlite."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

# The residual blocks of each of the four stages, by the number of layers (He et al., 2016, table
# 1; 10 layers are the least that have all stages).
STAGES = {
    10: (1, 1, 1, 1),
    18: (2, 2, 2, 2),
    34: (3, 4, 6, 3),
    50: (3, 4, 6, 3),
    101: (3, 4, 23, 3),
    152: (3, 8, 36, 3),
}


class MLP(nn.Sequential):
    """Images of 28 x 28 to 10 classes, 784-700-500-10 neurons: about 900,000 parameters."""

    def __init__(self) -> None:
        super().__init__(
            nn.Flatten(),
            *(nn.Linear(784, 700), nn.ReLU()),
            *(nn.Linear(700, 500), nn.ReLU()),
            nn.Linear(500, 10),
        )


def convolution(
    channels_in: int, channels: int, size: int, stride: int = 1, gain: float = 1.0
) -> nn.Sequential:
    """A convolution that keeps the height and width, or divides them by the stride, and its
    batch normalization, which multiplies by `gain` at first."""
    normalization = nn.BatchNorm2d(channels)
    nn.init.constant_(normalization.weight, gain)
    padding = size // 2
    return nn.Sequential(
        nn.Conv2d(channels_in, channels, size, stride, padding, bias=False), normalization
    )


class Block(nn.Module):
    """relu(x + f(x)). f is two convolutions, or in deep networks a bottleneck: one to fewer
    channels, one of 3 x 3, and one back."""

    def __init__(self, channels_in: int, channels: int, stride: int, bottleneck: bool) -> None:
        super().__init__()
        # At first f(x) is 0: large batches then start as well as small ones (Goyal et al., 2017).
        if bottleneck:
            inner = channels // 4
            self.residual = nn.Sequential(
                *(convolution(channels_in, inner, 1), nn.ReLU()),
                *(convolution(inner, inner, 3, stride), nn.ReLU()),
                convolution(inner, channels, 1, gain=0.0),
            )
        else:
            self.residual = nn.Sequential(
                *(convolution(channels_in, channels, 3, stride), nn.ReLU()),
                convolution(channels, channels, 3, gain=0.0),
            )
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels_in != channels:
            self.shortcut = convolution(channels_in, channels, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.shortcut(x) + self.residual(x))


class ResNet(nn.Sequential):
    """A residual network on RGB images (He et al., 2016), of 10, 18, 34, 50, 101 or 152 layers.

    The first stage has `width` channels, 64 in the paper; in networks of 50 layers and more four
    times as many. Images below 64 x 64 keep their size in the first layer, as is usual for CIFAR.
    """

    def __init__(self, layers: int, classes: int, width: int = 64, image_size: int = 224) -> None:
        if image_size < 64:
            stem = [convolution(3, width, 3), nn.ReLU()]
        else:
            stem = [convolution(3, width, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, padding=1)]
        bottleneck = layers >= 50
        blocks: list[nn.Module] = []
        channels = width
        for stage, count in enumerate(STAGES[layers]):
            wider = width * 2**stage * (4 if bottleneck else 1)
            for number in range(count):
                stride = 2 if stage > 0 and number == 0 else 1
                blocks.append(Block(channels, wider, stride, bottleneck))
                channels = wider
        head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes)]
        super().__init__(*stem, *blocks, *head)


# What the examples that measure speed offer: the network and the shape of an image.
MEASURED: dict[str, tuple[Callable[[], nn.Module], tuple[int, int, int]]] = {
    "mlp": (MLP, (1, 28, 28)),
    "resnet": (lambda: ResNet(10, classes=10, width=32, image_size=32), (3, 32, 32)),
    "resnet50": (lambda: ResNet(50, classes=1000), (3, 224, 224)),
}


class Attention(nn.Module):
    """Each position looks at itself and at what stands before it."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.project_in = nn.Linear(width, 3 * width)
        self.project_out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.project_in(x).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        seen = scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.project_out(seen.transpose(1, 2).reshape(batch, length, width))


class Layer(nn.Module):
    """A layer of a GPT: attention and a perceptron, each added to what came in."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention = nn.Sequential(nn.LayerNorm(width), Attention(width, heads))
        self.perceptron = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x)
        return x + self.perceptron(x)


class GPT(nn.Module):
    """Predicts the next token at each position (Radford et al., 2019).

    int64[batch, length] to float[batch, length, tokens], length at most `context`.
    """

    def __init__(self, tokens: int, context: int, layers: int, width: int, heads: int) -> None:
        super().__init__()
        self.context = context
        self.tokens = nn.Embedding(tokens, width)
        self.positions = nn.Embedding(context, width)
        self.layers = nn.Sequential(*(Layer(width, heads) for _ in range(layers)))
        self.scores = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, tokens))
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        return self.scores(self.layers(self.tokens(tokens) + self.positions(places)))
