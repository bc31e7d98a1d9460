"""LoRA training steps of w2v-BERT 2.0 with layer adapters and MFA, beside WeSpeaker's.

    python benchmarks/encoder_step.py --peer DIR --json FILE     # a checkout of WeSpeaker

In: synthetic crops, and a pretrained model with random weights: 12 layers of 256 instead of 24 of
1,024. Out: a row for each precision, with peak memory.

A step goes from waves to the optimizer's: features, encoder with LoRA, aggregation, margin head of
1,000 classes, backward, AdamW. Ours is what training builds from `conf/w2vbert2_mfa.yaml`. The peer
is WeSpeaker's front end, with the feature extractor of `transformers` and LoRA of `peft`, its model
and its head, as its recipe calls them. A bf16 row has both under autocast; WeSpeaker's recipe does
that on a GPU alone. Before anything is timed, the states of all layers must be equal to 1e-4.

Letters: B crops, S samples, T frames, C channels of a state or classes, D embedding.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sides import (
    ROOT,
    add_seconds,
    close_sides,
    import_peer,
    peaks_of,
    report,
    require_equal,
    run_case,
    run_of,
    start_sides,
    take_turns,
    timed,
    wants,
)
from sides import Side as AnySide
from torch import Tensor, nn
from torch.nn import functional as F

PEERS = ("wespeaker",)
RATE = 16000
NUM_CLASSES = 1000
SCALE, MARGIN = 32.0, 0.2
LR = 1e-4
ALLOWED = 1e-4
COMPARED = 2  # crops whose states must be equal
SIZES = {
    "hidden_size": 256,
    "num_hidden_layers": 12,
    "num_attention_heads": 4,
    "intermediate_size": 1024,
}
# As the recipes train: nothing is dropped.
REGULAR = {
    "apply_spec_augment": False,
    "layerdrop": 0.0,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "conformer_conv_dropout": 0.0,
}


def write_encoder(folder: Path) -> None:
    """Write a w2v-BERT with random weights, as Hugging Face stores it."""
    import transformers

    torch.manual_seed(0)
    config = transformers.Wav2Vec2BertConfig(**SIZES, **REGULAR)
    transformers.Wav2Vec2BertModel(config).save_pretrained(folder)
    transformers.SeamlessM4TFeatureExtractor().save_pretrained(folder)


class Side(AnySide):
    """A model, its head and its optimizer on one device."""

    optimizer: torch.optim.Optimizer

    def __init__(
        self,
        encoder: str,
        device: str,
        micro_batch: int,
        crop_seconds: float,
        precision: str,
    ) -> None:
        torch.manual_seed(0)
        self.device = device
        self.precision = precision
        self.build(encoder)
        generator = torch.Generator().manual_seed(0)
        shape = (micro_batch, round(crop_seconds * RATE))
        wave_BS = 0.1 * torch.randn(shape, generator=generator)
        self.wave_BS = wave_BS.to(device)
        label_B = torch.randint(NUM_CLASSES, (micro_batch,), generator=generator)
        self.label_B = label_B.to(device)

    def build(self, encoder: str) -> None:
        """Build model, head and optimizer over the pretrained model in a folder."""
        raise NotImplementedError

    def loss(self) -> Tensor:
        """Return the loss of the crops."""
        raise NotImplementedError

    def states(self, wave_BS: Tensor) -> list[Tensor]:
        """Return the states of all layers."""
        raise NotImplementedError

    def run(self, steps: int) -> float:
        """Return the seconds of so many steps."""
        return timed(self.step, self.device, steps=steps)

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.loss().backward()
        self.optimizer.step()

    @torch.no_grad()
    def values(self, path: str) -> None:
        """Write the states of all layers, in fp32."""
        states = self.states(self.wave_BS[:COMPARED])
        named: dict[str, Any] = {}
        for number, state_BTC in enumerate(states):
            named[f"layer{number}"] = state_BTC.numpy(force=True)
        np.savez(path, **named)


class Ours(Side):
    """What training builds from `conf/w2vbert2_mfa.yaml`."""

    def build(self, encoder: str) -> None:
        from speakerlab.config import build
        from speakerlab.config.schema import load_config
        from speakerlab.training.precision import resolve_precision

        layers = [ROOT / "conf/w2vbert2_mfa.yaml"]
        config = load_config(layers, [f"frontend.model={encoder}"])
        precision = resolve_precision(self.precision, self.device)
        task = build.build_task(config, num_classes=NUM_CLASSES, precision=precision)
        self.task: Any = task.to(self.device)
        groups = build.parameter_groups(config, task)
        self.optimizer = build.build_optimizer(config, groups, lr=LR)
        self.task.train()

    def loss(self) -> Tensor:
        return self.task(self.wave_BS, self.label_B, MARGIN).loss

    def states(self, wave_BS: Tensor) -> list[Tensor]:
        front_end = self.task.embedder.frontend
        return front_end.states(front_end.inputs(wave_BS))


class WeSpeaker(Side):
    """WeSpeaker's front end, model and head, with the values of its recipe's first stage."""

    def build(self, encoder: str) -> None:
        front_ends = import_peer("wespeaker.frontend.w2vbert")
        models = import_peer("wespeaker.models.w2vbert_adapter_mfa")
        projections = import_peer("wespeaker.models.projections")
        lora = {
            "r": 64,
            "lora_alpha": 128,
            "lora_dropout": 0.0,
            "bias": "none",
            "target_modules": ["linear_q", "linear_v"],
        }
        front_end = front_ends.W2VBertFrontend(
            model_name=encoder, frozen=True, use_lora=True, lora_config_args=lora
        )
        model = models.W2VBert_Adapter_MFA(
            feat_dim=SIZES["hidden_size"],
            embed_dim=256,
            num_frontend_hidden_layers=SIZES["num_hidden_layers"],
        )
        head = projections.ArcMarginProduct(
            256, NUM_CLASSES, scale=SCALE, margin=MARGIN
        )
        parts = {"front_end": front_end, "model": model, "head": head}
        self.parts = nn.ModuleDict(parts).to(self.device)
        self.parts.train()
        learned = [p for p in self.parts.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(learned, lr=LR, weight_decay=1e-4)

    def _states(self, wave_BS: Tensor) -> Any:
        num_samples_B = torch.full((len(wave_BS),), wave_BS.shape[1])
        states, _ = self.parts["front_end"](wave_BS, num_samples_B)
        return states

    def loss(self) -> Tensor:
        is_bf16 = self.precision == "bf16"
        with torch.autocast(self.device, torch.bfloat16, enabled=is_bf16):
            emb_BD = self.parts["model"](self._states(self.wave_BS))[-1]
            logits_BC = self.parts["head"](emb_BD, self.label_B)
            return F.cross_entropy(logits_BC.float(), self.label_B)

    def states(self, wave_BS: Tensor) -> list[Tensor]:
        return list(self._states(wave_BS))


SIDES = {"ours": Ours, "wespeaker": WeSpeaker}


def compare(options: argparse.Namespace) -> Iterator[Any]:
    """Yield a row for each precision."""
    encoder = options.folder / "encoder"
    write_encoder(encoder)
    for precision in ("fp32", "bf16"):
        name = f"train.w2vbert2_mfa.lora.{precision}.wespeaker"
        if not wants(options, name):
            continue
        sides = start_sides(
            "encoder_step",
            options.threads,
            options.peers,
            encoder=encoder,
            device=options.device,
            micro_batch=options.micro_batch,
            crop_seconds=options.crop_seconds,
            precision=precision,
        )
        if options.peers:
            require_equal("states", sides, options.folder, allowed=ALLOWED)
        turns = take_turns(
            [run_of(side) for side in sides],
            amount=options.micro_batch,
            seconds=options.seconds,
        )
        yield report(name, turns, unit="crops/s", **peaks_of(sides))
        close_sides(sides)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--crop-seconds", type=float, default=3.0)
    parser.add_argument("--micro-batch", type=int, default=16)
    add_seconds(parser, 30.0)


if __name__ == "__main__":
    run_case(__doc__, compare, add_options, peers=PEERS)
