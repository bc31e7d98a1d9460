"""The one waveform-to-segmentation module: training, diarization and ONNX all run it.

Letters: B windows, S samples, F frames, C sets of speakers.
"""

from collections.abc import Callable

from torch import Tensor, nn


class Segmenter(nn.Module):
    """Front end and backbone of a segmentation network.

    window_samples: of a training crop, which is also how much `diarize` shows it at once.
    """

    def __init__(
        self, *, frontend: nn.Module, backbone: nn.Module, window_samples: int
    ) -> None:
        super().__init__()
        self.frontend = frontend
        self.backbone = backbone
        self.window_samples = window_samples
        self.sample_rate: int = frontend.sample_rate  # pyright: ignore[reportAttributeAccessIssue]
        # A frame of the front end may be several samples.
        shift: int = frontend.frame_shift  # pyright: ignore[reportAssignmentType]
        self.hop_samples: int = backbone.hop_samples * shift  # pyright: ignore[reportOperatorIssue, reportAttributeAccessIssue]
        self.field_samples: int = backbone.field_samples * shift  # pyright: ignore[reportOperatorIssue, reportAttributeAccessIssue]
        self.num_sets: int = backbone.num_sets  # pyright: ignore[reportAttributeAccessIssue]

    def forward(
        self, wave_BS: Tensor, spec_augment: Callable[[Tensor], Tensor] | None = None
    ) -> Tensor:
        """Return log_prob_BFC of waves in [-1, 1]; spec_augment masks features."""
        feats_BTF = self.frontend(wave_BS)
        if spec_augment is not None:
            feats_BTF = spec_augment(feats_BTF)
        return self.backbone(feats_BTF)

    def num_frames(self, num_samples: int) -> int:
        """Return the number of frames of the output."""
        backbone: nn.Module = self.backbone
        frontend: nn.Module = self.frontend
        num_input_frames = frontend.num_frames(num_samples)  # pyright: ignore[reportCallIssue]
        return backbone.num_frames(num_input_frames)  # pyright: ignore[reportCallIssue]

    def centre_samples(self, frame: int) -> float:
        """Return the sample in the middle of a frame's receptive field."""
        return self.field_samples / 2 + frame * self.hop_samples
