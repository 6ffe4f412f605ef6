"""What training scripts write around the optimizer, each time anew: learning rates of large
batches, metrics, checkpoints, samplers, seeds, what only rank 0 does. Imports no package that a
script may lack (tqdm, TensorBoard, torchmetrics) before it is used."""

from hvdlite.recipes.checkpoint_files import CheckpointError
from hvdlite.recipes.checkpointer import Checkpointer
from hvdlite.recipes.learning_rate import GradualWarmup, scale_lr
from hvdlite.recipes.metrics import Metric, average_metrics
from hvdlite.recipes.momentum_correction import correct_momentum
from hvdlite.recipes.profiles import profile
from hvdlite.recipes.progress import progress_bar
from hvdlite.recipes.ranks import only_rank, rank_first, rank_zero_print
from hvdlite.recipes.samplers import DistributedSampler, ElasticDistributedSampler
from hvdlite.recipes.seeds import seed_workers, seeded_generator, set_seed
from hvdlite.recipes.summaries import SummaryWriter
from hvdlite.recipes.torch_metrics import synchronized

__all__ = [
    "CheckpointError",
    "Checkpointer",
    "DistributedSampler",
    "ElasticDistributedSampler",
    "GradualWarmup",
    "Metric",
    "SummaryWriter",
    "average_metrics",
    "correct_momentum",
    "only_rank",
    "profile",
    "progress_bar",
    "rank_first",
    "rank_zero_print",
    "scale_lr",
    "seed_workers",
    "seeded_generator",
    "set_seed",
    "synchronized",
]
