"""Settings of a model and a training that are done in seconds."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
TINY = [
    "model.args.head_channels=4",
    "model.args.init_channels=16",
    "model.args.growth_rate=8",
    "model.args.blocks=[2,2,2]",
    "model.args.embed_dim=32",
    "data.crop_seconds=0.6",
    "data.valid_speakers=2",
    "training.global_batch=8",
    "training.num_epochs=4",
    "training.checkpoint_every_steps=2",
    "runtime.log_every_steps=1",
    "runtime.log_every_seconds=0.001",
    "runtime.num_workers=1",
    "runtime.precision=fp32",
]
