"""DINO: a student learns to predict the output of its moving average for another view.

Caron et al., Emerging Properties in Self-Supervised Vision Transformers, ICCV 2021, arXiv
2104.14294. With the regularizers of RDINO: Chen et al., Pushing the Limits of Self-Supervised
Speaker Verification Using Regularized Distillation Framework, ICASSP 2023, arXiv 2211.04168; after
Bardes et al., VICReg, ICLR 2022, arXiv 2105.04906.
Letters: see objective.py; W width of the layer that is regularized.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from speakerlab.core.full_precision import autocast_off, widened
from speakerlab.losses.objective import Compared, Objective, gather_utterances, mlp
from speakerlab.losses.shards import Shards

MIN_VARIANCE = 1e-4  # added under the root, whose slope at 0 is infinite


class DinoProjector(nn.Module):
    """Embedding -> the layer that is regularized -> bottleneck -> K logits, which are cosines.

    wide_dim: width of the regularized layer, if it is RDINO's extra one; 0: the bottleneck.
    """

    def __init__(
        self,
        embed_dim: int,
        hidden_dim: int,
        wide_dim: int,
        bottleneck_dim: int,
        num_outputs: int,
    ) -> None:
        super().__init__()
        regularized_dim = wide_dim or bottleneck_dim
        widths = [embed_dim, hidden_dim, hidden_dim, regularized_dim]
        self.mlp = mlp(widths, batch_norm=True)
        # With a single width, `mlp` returns the identity.
        narrow_widths = [regularized_dim]
        if wide_dim:
            narrow_widths.append(bottleneck_dim)
        self.narrow = mlp(narrow_widths, batch_norm=False)
        weight_KD = torch.randn(num_outputs, bottleneck_dim)
        self.weight_KD = nn.Parameter(weight_KD)

    def forward(self, emb_ND: Tensor) -> tuple[Tensor, Tensor]:
        """Return (regularized_NW, logits_NK)."""
        regularized_NW = self.mlp(emb_ND)
        bottleneck_ND = self.narrow(regularized_NW)
        unit_ND = F.normalize(bottleneck_ND, dim=1)
        unit_KD = F.normalize(self.weight_KD, dim=1)
        logits_NK = F.linear(unit_ND, unit_KD)
        return regularized_NW, logits_NK


class DINO(Objective):
    """Cross-entropy between a student's softmax and its teacher's centred, sharpened softmax.

    teacher_temp: [at first, after `temp_warmup_epochs`], linear in between. std_weight, cov_weight:
    weights of the two regularizers, both 0 for plain DINO; their sum is weighted by
    `regularizer_weight`: [at first, after `regularizer_warmup_epochs`]. wide_dim: width of RDINO's
    extra layer; 0 for none. freeze_epochs: the last layer does not change in the first epochs.

    The regularizers compare the utterances of a batch, so gradients cannot be accumulated.
    """

    def __init__(
        self,
        *,
        embed_dim: int,
        shards: Shards | None = None,
        hidden_dim: int = 2048,
        wide_dim: int = 8192,
        bottleneck_dim: int = 256,
        num_outputs: int = 65536,
        student_temp: float = 0.1,
        teacher_temp: tuple[float, float] = (0.04, 0.04),
        temp_warmup_epochs: float = 10.0,
        center_momentum: float = 0.9,
        freeze_epochs: float = 1.0,
        std_weight: float = 10.0,
        cov_weight: float = 1.0,
        regularizer_weight: tuple[float, float] = (0.05, 0.2),
        regularizer_warmup_epochs: float = 10.0,
    ) -> None:
        super().__init__()
        self.shards = shards
        self.num_prototypes = num_outputs
        self.projector = DinoProjector(
            embed_dim=embed_dim,
            hidden_dim=hidden_dim,
            wide_dim=wide_dim,
            bottleneck_dim=bottleneck_dim,
            num_outputs=num_outputs,
        )
        self.student_temp = student_temp
        self.teacher_temp = teacher_temp
        self.temp_warmup_epochs = temp_warmup_epochs
        self.center_momentum = center_momentum
        self.std_weight = std_weight
        self.cov_weight = cov_weight
        self.regularizer_weight = regularizer_weight
        self.regularizer_warmup_epochs = regularizer_warmup_epochs
        self.needs_whole_batch = bool(std_weight or cov_weight)
        self.freeze_epochs = freeze_epochs
        self.register_buffer("center_K", torch.zeros(num_outputs))
        self.begin_step(0.0)

    @staticmethod
    def check_views(num_long: int, num_short: int) -> None:
        if num_long + num_short < 2:
            raise ValueError(
                f"views: dino compares different views, {num_long} long and {num_short}"
                " short are too few; set views.long=2"
            )

    def begin_step(self, epoch: float) -> None:
        self.epoch = epoch
        # For the centre: the teacher's logits summed over each micro-batch, and their number.
        self.teacher_sums: list[Tensor] = []
        self.num_teacher_rows = 0

    def drop_gradients(self) -> None:
        # The optimizer skips a parameter without a gradient; with a gradient of zero, it would
        # still apply momentum and weight decay.
        if self.epoch < self.freeze_epochs:
            weight: nn.Parameter = self.projector.weight_KD  # pyright: ignore[reportAssignmentType]
            weight.grad = None

    @torch.no_grad()
    def end_step(self, is_bad: Tensor) -> None:
        """Move the centre towards the mean of the teacher's logits over all ranks."""
        sums_MK = torch.stack(self.teacher_sums)
        sum_K = sums_MK.sum(0)
        num_rows = self.num_teacher_rows
        if self.shards is not None:
            sum_K = self.shards.sum(sum_K)
            num_rows *= self.shards.world_size
        center_K = self.get_buffer("center_K")
        mean_K = sum_K / num_rows
        moved_K = center_K.lerp(mean_K, 1 - self.center_momentum)
        # A branch on `is_bad` would wait for the GPU.
        next_center_K = torch.where(is_bad > 0, center_K, moved_K)
        center_K.copy_(next_center_K)

    def forward(
        self,
        emb_VBD: Tensor,
        emb_LBD: Tensor | None,
        teacher_projector: nn.Module | None,
    ) -> Compared:
        assert emb_LBD is not None and teacher_projector is not None
        with autocast_off(emb_VBD):
            # The outputs of the student for all views, and of the teacher for the long views.
            num_long = len(emb_LBD)
            student_shape = emb_VBD.shape[:2]
            teacher_shape = emb_LBD.shape[:2]
            emb_ND = widened(emb_VBD).flatten(0, 1)
            regularized_NW, logits_NK = self.projector(emb_ND)
            logits_VBK = logits_NK.unflatten(0, student_shape)

            with torch.no_grad():
                teacher_emb_ND = widened(emb_LBD).flatten(0, 1)
                _, target_NK = teacher_projector(teacher_emb_ND)
            target_LBK = target_NK.unflatten(0, teacher_shape)
            # For `end_step`, which moves the centre.
            self.teacher_sums.append(target_NK.sum(0))
            self.num_teacher_rows += len(target_NK)

            center_K = self.get_buffer("center_K")
            teacher_temp = ramp(
                self.epoch,
                self.teacher_temp,
                num_epochs=self.temp_warmup_epochs,
            )
            loss = distill(
                logits_VBK,
                target_LBK,
                center_K=center_K,
                student_temp=self.student_temp,
                teacher_temp=teacher_temp,
            )
            if self.needs_whole_batch:
                # The mean over the long views, which come first. The teacher's output has no
                # gradient: to regularize it too would only add a constant.
                regularized_VBW = regularized_NW.unflatten(0, student_shape)
                long_LBW = regularized_VBW[:num_long]
                mean_1BW = long_LBW.mean(0, keepdim=True)
                loss = loss + self._regularize(mean_1BW)

            # All views of the student are compared with the teacher's first view.
            chosen_LB = (target_LBK - center_K).argmax(2)
            is_equal_VB = logits_VBK.argmax(2) == chosen_LB[0]
            accuracy = is_equal_VB.to(loss.dtype).mean()
            return Compared(
                loss=loss,
                accuracy=accuracy,
                target_N=chosen_LB.flatten(),
            )

    def _regularize(self, mean_1BW: Tensor) -> Tensor:
        """Return RDINO's two regularizers of the utterances of all ranks, weighted."""
        mean_1GW = gather_utterances(mean_1BW, self.shards)
        shortfall, covariance = measure_spread(mean_1GW[0])
        weight = ramp(
            self.epoch,
            self.regularizer_weight,
            num_epochs=self.regularizer_warmup_epochs,
        )
        std_term = self.std_weight * shortfall / 2
        cov_term = self.cov_weight * covariance
        return weight * (std_term + cov_term)


def distill(
    logits_VBK: Tensor,
    teacher_LBK: Tensor,
    *,
    center_K: Tensor,
    student_temp: float,
    teacher_temp: float,
) -> Tensor:
    """Return DINO's loss: the mean cross-entropy over pairs of different views.

    A pair is one of the teacher's L views and one of the student's V views. The first L views are
    the same for both.
    """
    # Without the centre, all targets could choose the same entry; without sharpening, they could
    # become uniform. Each of the two prevents the collapse that the other encourages.
    target_LBK = teacher_LBK - center_K
    target_LBK = F.softmax(target_LBK / teacher_temp, dim=2)
    log_VBK = F.log_softmax(logits_VBK / student_temp, dim=2)
    num_long = len(target_LBK)
    num_views = len(log_VBK)

    # Cross-entropy is linear in the logarithms: sum them over all views but the teacher's view.
    others_LBK = log_VBK.sum(0) - log_VBK[:num_long]
    total_B = -(target_LBK * others_LBK).sum((0, 2))
    num_pairs = num_long * (num_views - 1)
    return total_B.mean() / num_pairs


def measure_spread(x_GW: Tensor) -> tuple[Tensor, Tensor]:
    """Return VICReg's two terms, which are small where dimensions vary and do not correlate.

    Shortfall: by how much deviations fall short of 1, on average. Covariance: squared covariances
    of every two different dimensions, summed and divided by W.
    """
    num_rows, width = x_GW.shape
    x_GW = x_GW - x_GW.mean(0)
    degrees = num_rows - 1  # of freedom: variances are unbiased
    var_W = x_GW.square().sum(0) / degrees
    deviation_W = (var_W + MIN_VARIANCE).sqrt()
    shortfall_W = F.relu(1 - deviation_W)

    # The squares of all entries of x.T @ x and of x @ x.T have the same sum; take the smaller one.
    gram = x_GW @ x_GW.T if num_rows < width else x_GW.T @ x_GW
    squares = gram.square().sum() / degrees**2
    # Without the diagonal, which holds the variances.
    diagonal = var_W.square().sum()
    covariance = (squares - diagonal) / width
    return shortfall_W.mean(), covariance


def ramp(epoch: float, ends: tuple[float, float], *, num_epochs: float) -> float:
    """Return the first of `ends` at epoch 0, the last from `num_epochs` on, linear in between."""
    first, last = ends
    share_done = 1.0
    if num_epochs:
        share_done = min(epoch / num_epochs, 1.0)
    return first + (last - first) * share_done
