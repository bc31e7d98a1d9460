"""The one waveform-to-embedding module: training, extraction, the API and ONNX all run it.

Letters: B rows, S samples, T frames, F mel bins, D embedding.
"""

import copy
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from speakerlab.config.schema import Config
from speakerlab.core.windows import embed_in_windows
from speakerlab.frontend.fbank import Fbank
from speakerlab.frontend.vad import EnergyVad
from speakerlab.models import MODELS
from speakerlab.models.folding import fold_batchnorm, narrow
from speakerlab.training.precision import Precision


def build_embedder(config: Config) -> "Embedder":
    """Build waveform to embedding, with weights drawn from the configuration's seed."""
    torch.manual_seed(config.seed)
    fbank = Fbank(**config.frontend)
    backbone = build_backbone(config)
    vad = None
    if config.vad is not None:
        vad = EnergyVad(sample_rate=config.frontend["sample_rate"], **config.vad)
    max_seconds = config.model.max_seconds
    return Embedder(fbank=fbank, backbone=backbone, max_seconds=max_seconds, vad=vad)


def build_backbone(config: Config) -> nn.Module:
    """Build the network; ValueError if there is none of these arguments."""
    name, args = config.model.name, config.model.args
    try:
        return MODELS[name](feat_dim=config.frontend["num_mel_bins"], **args)
    except ValueError:
        raise
    except Exception as error:  # of torch, for impossible sizes
        reason = str(error).partition("\n")[0]
        raise ValueError(f"model.args: {name} cannot be built ({reason}); correct them") from error


class Embedder(nn.Module):
    """Front end and backbone.

    Input longer than `max_seconds` is cut into equal windows whose embeddings are averaged, which
    bounds memory; input too short for the backbone is repeated. vad: removes silence before a whole
    recording is embedded; it takes one wave at a time and is not applied here. precision: format of
    the backbone outside training; embeddings are float32.
    """

    def __init__(
        self,
        *,
        fbank: Fbank,
        backbone: nn.Module,
        max_seconds: float = 120.0,
        vad: EnergyVad | None = None,
        precision: Precision | None = None,
    ) -> None:
        super().__init__()
        self.precision = precision
        self.fbank, self.backbone, self.vad = fbank, backbone, vad
        self.sample_rate = fbank.sample_rate
        self.embed_dim: int = backbone.embed_dim  # pyright: ignore[reportAttributeAccessIssue]
        self.max_samples = round(max_seconds * self.sample_rate)
        min_frames: int = backbone.min_frames  # pyright: ignore[reportAssignmentType]
        self.min_samples = fbank.min_samples + (min_frames - 1) * fbank.frame_shift
        self.compiled: tuple[nn.Module, ...] = ()  # a tuple, so that it is no submodule

    def compile_for_training(self) -> None:
        """Compile the backbone for training only: validation has crops of many lengths."""
        self.compiled = (torch.compile(self.backbone),)  # pyright: ignore[reportAttributeAccessIssue]

    def forward(
        self, wave_BS: Tensor, spec_augment: Callable[[Tensor], Tensor] | None = None
    ) -> Tensor:
        """Return emb_BD of waves in [-1, 1] of any length above 0.

        In training the input may be stored log mel energies (B, T, F); spec_augment masks features.
        """
        if wave_BS.dim() == 3 or self.min_samples <= wave_BS.shape[1] <= self.max_samples:
            return self.embed_window(wave_BS, spec_augment)
        embed = partial(self.embed_window, spec_augment=spec_augment)
        return embed_in_windows(
            wave_BS, embed, min_samples=self.min_samples, max_samples=self.max_samples
        )

    def embed_window(
        self, wave_BS: Tensor, spec_augment: Callable[[Tensor], Tensor] | None = None
    ) -> Tensor:
        """Return emb_BD of waves of `min_samples` to `max_samples`; an exported model does this."""
        return self.embed_features(self.features(wave_BS, spec_augment))

    def features(
        self, wave_BS: Tensor, spec_augment: Callable[[Tensor], Tensor] | None = None
    ) -> Tensor:
        """Return feats_BTF, what the backbone gets."""
        is_stored = wave_BS.dim() == 3
        feats_BTF = self.fbank.normalise(wave_BS) if is_stored else self.fbank(wave_BS)
        return feats_BTF if spec_augment is None else spec_augment(feats_BTF)

    def embed_features(self, feats_BTF: Tensor) -> Tensor:
        """Return emb_BD of what `features` returns."""
        backbone = self.compiled[0] if self.compiled and self.training else self.backbone
        if self.precision is None:
            return backbone(feats_BTF)
        with self.precision.autocast():
            return backbone(feats_BTF).float()

    def for_inference(
        self, precision: Precision | None = None, *, in_place: bool = False
    ) -> "Embedder":
        """Return an equal but faster embedder, with BatchNorm folded into its neighbours.

        A backbone from outside of speakerlab stays as it is: that nothing else reads the output of
        a folded layer is tested for ours only. precision: from `resolve_precision`; None: fp32. The
        front end and the layers from the pooling on stay fp32. in_place: reuse the weights of this
        one, which is then unusable.
        """
        is_ours = type(self.backbone).__module__.startswith("speakerlab.")
        backbone = self.backbone if in_place else copy.deepcopy(self.backbone)
        backbone = fold_batchnorm(backbone) if is_ours else backbone
        if precision is not None and precision.name == "fp32":
            precision = None
        if precision is not None and is_ours:
            backbone = narrow(backbone, precision.dtype)
        return Embedder(
            fbank=self.fbank,
            # The outputs of 2-D convolutions follow the layout of their weights: faster on a CPU.
            backbone=backbone.to(memory_format=torch.channels_last),  # pyright: ignore[reportCallIssue]
            max_seconds=self.max_samples / self.sample_rate,
            vad=self.vad,
            precision=precision,
        ).eval()

    def batch_key(self, num_samples: int) -> tuple[int, int]:
        """Return a key; inputs of one key may be trimmed to the shortest and share a batch."""
        is_whole = self.min_samples <= num_samples <= self.max_samples  # not repeated, not cut
        is_whole &= self.fbank.is_kaldi and self.fbank.snip_edges  # else the last samples matter
        frames = self.fbank.num_frames(max(num_samples, self.min_samples))
        return frames, 0 if is_whole else num_samples
