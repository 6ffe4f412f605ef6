"""examples/networks.py: the networks are those of the papers."""

import pytest
import torch

from examples.networks import GPT, MLP, ResNet


def numel(model):
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(
    ("layers", "expected"),
    # What torchvision's documentation says of its models.
    [(18, 11_689_512), (34, 21_797_672), (50, 25_557_032), (101, 44_549_160)],
)
def test_a_resnet_has_as_many_parameters_as_that_of_the_paper(layers, expected):
    with torch.device("meta"):
        assert numel(ResNet(layers, classes=1000)) == expected


def test_the_mlp_has_784_700_500_10_neurons():
    assert numel(MLP()) == 784 * 700 + 700 + 700 * 500 + 500 + 500 * 10 + 10


@pytest.mark.parametrize(("layers", "size"), [(10, 16), (50, 64)])
def test_a_resnet_begins_with_residuals_of_zero(layers, size):
    model = ResNet(layers, classes=7, width=4, image_size=size).eval()
    blocks = [child for child in model if hasattr(child, "residual")]
    assert len(blocks) == {10: 4, 50: 16}[layers]
    x = torch.rand(1, 4, 8, 8)
    for block in blocks:
        assert torch.equal(block(x), torch.relu(block.shortcut(x)))
        x = block(x)
    assert model(torch.rand(2, 3, size, size)).shape == (2, 7)


def test_a_gpt_looks_at_nothing_that_comes_later():
    torch.manual_seed(0)
    model = GPT(tokens=11, context=8, layers=2, width=16, heads=2)
    text = torch.arange(8)[None]
    changed = text.clone()
    changed[0, 5] = 9
    before, after = model(text), model(changed)
    assert torch.equal(before[0, :5], after[0, :5])
    assert all(not torch.equal(before[0, place], after[0, place]) for place in (5, 6, 7))
