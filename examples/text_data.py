"""English text, as the tokens of its characters. Nothing here knows of hvdlite.

The text is the reference of the Python language, which `help("if")` shows: 400,000 characters that
are in every installation of Python, so that nothing is downloaded.
"""

from pydoc_data.topics import topics

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.data import Dataset

PADDING = -100  # the target that cross_entropy leaves out


class Paragraphs(Dataset[Tensor]):
    """Paragraphs of different lengths: int64[characters + 1], from newline to newline."""

    def __init__(self, texts: list[str], vocabulary: str) -> None:
        self.vocabulary = vocabulary
        numbers = {character: number for number, character in enumerate(vocabulary)}
        self.texts = [torch.tensor([numbers[letter] for letter in text]) for text in texts]

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> Tensor:
        return self.texts[index]


def load_paragraphs(context: int) -> tuple[Paragraphs, Paragraphs]:
    """Those for training and, each tenth, those for testing; of long ones, parts of `context`
    characters."""
    text = "\n\n".join(topics[name] for name in sorted(topics))
    vocabulary = "".join(sorted(set(text)))
    paragraphs = [" ".join(lines.split()) for lines in text.split("\n\n")]
    parts = [
        f"\n{paragraph[start : start + context - 1]}\n"
        for paragraph in paragraphs
        for start in range(0, len(paragraph), context - 1)
    ]
    test = parts[::10]
    del parts[::10]
    return Paragraphs(parts, vocabulary), Paragraphs(test, vocabulary)


def together(texts: list[Tensor]) -> tuple[Tensor, Tensor]:
    """What the model reads and the next characters, int64[texts, longest]; of shorter texts the
    rest is 0 and PADDING."""
    longest = max(len(text) for text in texts)
    padded = torch.stack([pad(text, (0, longest - len(text)), value=PADDING) for text in texts])
    return padded[:, :-1].clamp(min=0), padded[:, 1:]
