"""A model that counts steps, so that a test sees whose steps its parameters contain."""

import torch

import hvdlite as hvd


class Steps(torch.nn.Module):
    """With SGD and lr=1, row w of each parameter is the number of worker w's steps that it
    contains."""

    def __init__(self, num_params):
        super().__init__()
        self.counts = torch.nn.ParameterList(
            torch.nn.Parameter(torch.zeros(hvd.size(), 3)) for _ in range(num_params)
        )

    def backward(self, worker):
        for param in self.counts:
            param.grad = torch.zeros_like(param)
            param.grad[worker] = -1

    def contained(self):
        """By worker, the fewest steps that any parameter contains."""
        return torch.stack(list(self.counts)).amin((0, 2)).tolist()
