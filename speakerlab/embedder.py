"""The one waveform-to-embedding module: training, extraction, the API and ONNX all run it.

Letters: B rows, S samples, T frames, F mel bins, C channels of a frame that is pooled, D embedding.
"""

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from speakerlab.core.full_precision import autocast_off
from speakerlab.core.windows import embed_in_windows
from speakerlab.frontend.fbank import Fbank
from speakerlab.frontend.pretrained import PretrainedFrontEnd
from speakerlab.frontend.vad import EnergyVad
from speakerlab.models.folding import fold_batchnorm, narrow
from speakerlab.models.frames import NotedFrames, noting_frames
from speakerlab.models.teacher_space import TeacherSpace
from speakerlab.training.precision import Precision

# Two lengths, in frames of the front end, at which a backbone shows where its own frames are. Their
# difference, 128, is a multiple of the steps of all backbones.
PROBE_FRAMES = (129, 257)


class FrameGrid(NamedTuple):
    """Where the frames of a backbone are, in frames of its front end.

    The middle of frame t is at first + t * step: with 2.0 and 4, at 2, 6, 10, ...
    """

    first: float
    step: int


class Embedder(nn.Module):
    """Front end and backbone: from waves to embeddings.

    frontend: mel features, or a pretrained model with weights of its own.
    max_seconds: longer input is cut into equal windows whose embeddings are averaged, which bounds
        memory. (Input too short for the backbone is repeated.)
    vad: removes silence before a whole recording is embedded. It takes one wave at a time and is
        not applied here.
    precision: format, outside training, of the backbone and of a pretrained model; embeddings are
        float32.
    projection: into the space of the teacher, for a student that keeps it.
    """

    def __init__(
        self,
        *,
        frontend: Fbank | PretrainedFrontEnd,
        backbone: nn.Module,
        max_seconds: float = 120.0,
        vad: EnergyVad | None = None,
        precision: Precision | None = None,
        projection: TeacherSpace | None = None,
    ) -> None:
        super().__init__()
        self.precision = precision
        self.frontend = frontend
        self.backbone = backbone
        self.vad = vad
        self.sample_rate = frontend.sample_rate
        self.embed_dim: int = backbone.embed_dim  # pyright: ignore[reportAttributeAccessIssue]
        self.projection = projection
        if projection is not None:
            self.embed_dim = projection.target_dim
        # A pretrained model may have positions for some seconds only.
        max_seconds = min(max_seconds, frontend.max_seconds)
        self.max_samples = round(max_seconds * self.sample_rate)
        min_frames: int = backbone.min_frames  # pyright: ignore[reportAssignmentType]
        later_frames = min_frames - 1
        self.min_samples = frontend.min_samples + later_frames * frontend.frame_shift
        # A tuple, so that it is no submodule, whose weights would be saved twice.
        self.compiled: tuple[nn.Module, ...] = ()
        # Found by the first pass that needs it.
        self.frame_grid: FrameGrid | None = None

    def compile_for_training(self, mode: str = "default") -> None:
        """Compile the backbone for training only: validation has crops of many lengths.

        mode: of `torch.compile`.
        """
        compiled = torch.compile(self.backbone, mode=mode)
        self.compiled = (compiled,)  # pyright: ignore[reportAttributeAccessIssue]

    def forward(
        self, wave_BS: Tensor, spec_augment: Callable[[Tensor], Tensor] | None = None
    ) -> Tensor:
        """Return emb_BD of waves in [-1, 1] of any length above 0.

        In training the input may be stored log mel energies (B, T, F); spec_augment masks features.
        """
        is_stored = wave_BS.dim() == 3
        num_samples = wave_BS.shape[1]
        is_one_window = self.min_samples <= num_samples <= self.max_samples
        if is_stored or is_one_window:
            return self.embed_window(wave_BS, spec_augment)
        embed = partial(self.embed_window, spec_augment=spec_augment)
        return embed_in_windows(
            wave_BS,
            embed,
            min_samples=self.min_samples,
            max_samples=self.max_samples,
        )

    def embed_window(
        self, wave_BS: Tensor, spec_augment: Callable[[Tensor], Tensor] | None = None
    ) -> Tensor:
        """Return emb_BD of waves of `min_samples` to `max_samples`; exported models run this."""
        feats_BTF = self.features(wave_BS, spec_augment)
        return self.embed_features(feats_BTF)

    def noting_frames(self) -> AbstractContextManager[NotedFrames]:
        """Return a block in which the frames of each pass are noted; see models/frames.py."""
        return noting_frames(self.backbone)

    def frames_of_window(self, wave_BS: Tensor) -> tuple[Tensor, Tensor]:
        """Return frames_BCT, the input of the pooling, and the middle sample of each frame, (T,).

        wave_BS: as of `embed_window`. Raises ValueError if the backbone has no `Pooling`.
        """
        if self.frame_grid is None:
            self.frame_grid = self._find_frame_grid(wave_BS)
        grid = self.frame_grid
        frames_BCT = self._noted_frames(wave_BS)

        # From frames of the backbone to frames of the front end, and to samples.
        index_T = torch.arange(frames_BCT.shape[-1])
        feat_T = grid.first + grid.step * index_T
        start_T = feat_T * self.frontend.frame_shift
        # Frames of the front end are as long as its shortest input.
        half_frame = self.frontend.min_samples / 2
        middle_T = (start_T + half_frame).round().long()
        # Padding in a backbone may make a frame beyond the wave.
        last_sample = wave_BS.shape[1] - 1
        return frames_BCT, middle_T.clamp(max=last_sample)

    def _noted_frames(self, wave_BS: Tensor) -> Tensor:
        """Return all frames_BCT of a pass."""
        with noting_frames(self.backbone, step=1) as noted:
            self.embed_window(wave_BS)
            return noted.take().float()

    def _find_frame_grid(self, wave_BS: Tensor) -> FrameGrid:
        """Count the frames of two lengths, which differ by a whole number of steps.

        For example, 129 and 257 frames of the front end become 32 and 64 frames of the backbone.
        So the step is (257 - 129) / (64 - 32) = 4. From the first middle to the last are 31 steps,
        124 of the 128 frames between the ends, so 2 are lost at each end: the first middle is at 2.
        """
        counts: list[int] = []
        for num_feats in PROBE_FRAMES:
            later_samples = (num_feats - 1) * self.frontend.frame_shift
            num_samples = self.frontend.min_samples + later_samples
            frames_BCT = self._noted_frames(wave_BS.new_zeros(1, num_samples))
            counts.append(frames_BCT.shape[-1])
        short_feats, long_feats = PROBE_FRAMES
        short_frames, long_frames = counts
        step = (long_feats - short_feats) // (long_frames - short_frames)
        # Convolutions without padding use up as much context before the first as after the last.
        num_spanned = step * (short_frames - 1)
        num_lost = short_feats - 1 - num_spanned
        return FrameGrid(first=num_lost / 2, step=step)

    def features(
        self, wave_BS: Tensor, spec_augment: Callable[[Tensor], Tensor] | None = None
    ) -> Tensor:
        """Return feats_BTF, the input of the backbone."""
        is_stored = wave_BS.dim() == 3
        if is_stored:
            # Stored energies are not normalised: the mean of a crop differs from its utterance's.
            assert isinstance(self.frontend, Fbank)
            feats_BTF = self.frontend.normalise(wave_BS)
        else:
            with self._autocast():
                feats_BTF = self.frontend(wave_BS)
        if spec_augment is not None:
            feats_BTF = spec_augment(feats_BTF)
        return feats_BTF

    def embed_features(self, feats_BTF: Tensor) -> Tensor:
        """Return emb_BD of the features that `features` returns."""
        backbone = self.backbone
        if self.compiled and self.training:
            backbone = self.compiled[0]
        with self._autocast():
            emb_BD = backbone(feats_BTF)
        if self.precision is not None:
            emb_BD = emb_BD.float()
        return self._project(emb_BD)

    def _autocast(self) -> AbstractContextManager[Any]:
        """Return the context of passes outside of training; in training the task sets it."""
        if self.precision is None:
            return nullcontext()
        return self.precision.autocast()

    def _project(self, emb_BD: Tensor) -> Tensor:
        """Return the embeddings in the space of the teacher, for a student that keeps it."""
        if self.projection is None:
            return emb_BD
        with autocast_off(emb_BD):
            return self.projection(emb_BD)

    def for_inference(
        self, precision: Precision | None = None, *, in_place: bool = False
    ) -> "Embedder":
        """Return an equal but faster embedder, with BatchNorm folded into its neighbours.

        A backbone from outside of speakerlab is not folded: folding changes the output of a layer,
        and only for our backbones do tests ensure that no other layer reads that output.
        precision: from `resolve_precision`; None: fp32. Features of sound and the layers from the
        pooling on stay fp32. in_place: reuse the weights of this embedder, which is then unusable.
        """
        if precision is not None and precision.name == "fp32":
            precision = None
        backbone = self.backbone
        frontend = self.frontend
        if not in_place:
            backbone = copy.deepcopy(backbone)
        if isinstance(frontend, PretrainedFrontEnd):
            if not in_place:
                frontend = copy.deepcopy(frontend)
            frontend.merge()
        module_name = type(self.backbone).__module__
        is_ours = module_name.startswith("speakerlab.")
        if is_ours:
            backbone = fold_batchnorm(backbone)
            if precision is not None:
                backbone = narrow(backbone, precision.dtype)
        # The outputs of 2-D convolutions follow the layout of their weights: faster on a CPU.
        backbone = backbone.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
        embedder = Embedder(
            frontend=frontend,
            backbone=backbone,
            max_seconds=self.max_samples / self.sample_rate,
            vad=self.vad,
            precision=precision,
            projection=self.projection,
        )
        return embedder.eval()

    def batch_key(self, num_samples: int) -> tuple[int, int]:
        """Return a key; inputs with equal keys may be trimmed to the shortest and share a batch."""
        # Shorter input is repeated up to `min_samples`.
        num_embedded = max(num_samples, self.min_samples)
        num_frames = self.frontend.num_frames(num_embedded)
        # Samples after the last frame matter if input is repeated or cut into windows, or if the
        # front end reads them.
        is_one_window = self.min_samples <= num_samples <= self.max_samples
        if is_one_window:
            return num_frames, self.frontend.samples_used(num_samples)
        return num_frames, num_samples
