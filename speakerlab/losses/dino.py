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

from speakerlab.core.full_precision import fp32_island, widened
from speakerlab.losses.objective import Compared, Objective, gather_utterances, mlp
from speakerlab.losses.shards import Shards

MIN_VARIANCE = 1e-4  # added below the root, whose slope at 0 is infinite


class DinoProjector(nn.Module):
    """Embedding -> the layer that is regularized -> K logits, by rows of unit length."""

    def __init__(
        self, embed_dim: int, hidden_dim: int, wide_dim: int, bottleneck_dim: int, num_outputs: int
    ) -> None:
        super().__init__()
        last = [wide_dim or bottleneck_dim]
        self.mlp = mlp([embed_dim, hidden_dim, hidden_dim, *last], batch_norm=True)
        self.narrow = mlp([*last, bottleneck_dim] if wide_dim else last, batch_norm=False)
        self.weight_KD = nn.Parameter(torch.randn(num_outputs, bottleneck_dim))

    def forward(self, emb_ND: Tensor) -> tuple[Tensor, Tensor]:
        """Return (regularized_NW, logits_NK)."""
        regularized_NW = self.mlp(emb_ND)
        bottleneck_ND = F.normalize(self.narrow(regularized_NW), dim=1)
        return regularized_NW, F.linear(bottleneck_ND, F.normalize(self.weight_KD, dim=1))


class DINO(Objective):
    """Cross-entropy between the softmax of a student and the sharpened, centred one of its teacher.

    teacher_temp: [at first, after `temp_warmup_epochs`], linear in between. std_weight and
    cov_weight: of the regularizers, both 0 for plain DINO; together they count
    `regularizer_weight`: [at first, after `regularizer_warmup_epochs`]. wide_dim: of RDINO's extra
    layer; 0 for none. freeze_epochs: at the start, without changes of the last layer.

    The regularizers compare the utterances of a batch: with them it cannot be accumulated.
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
        self.shards, self.num_prototypes = shards, num_outputs
        self.projector = DinoProjector(embed_dim, hidden_dim, wide_dim, bottleneck_dim, num_outputs)
        self.student_temp, self.center_momentum = student_temp, center_momentum
        self.temps, self.temp_epochs = teacher_temp, temp_warmup_epochs
        self.std_weight, self.cov_weight = std_weight, cov_weight
        self.weights, self.weight_epochs = regularizer_weight, regularizer_warmup_epochs
        self.needs_whole_batch = bool(std_weight or cov_weight)
        self.freeze_epochs = freeze_epochs
        self.register_buffer("center_K", torch.zeros(num_outputs))
        self.begin_step(0.0)

    @staticmethod
    def check_views(num_long: int, num_short: int) -> None:
        if num_long + num_short < 2:
            raise ValueError(
                f"views: dino compares different views, {num_long} long and {num_short} short are "
                "too few; set views.long=2"
            )

    def begin_step(self, epoch: float) -> None:
        self.epoch = epoch
        self.totals: list[Tensor] = []  # sum_K of the teacher's logits of each micro-batch
        self.num_rows = 0  # of them

    def drop_gradients(self) -> None:
        if self.epoch < self.freeze_epochs:
            weight: nn.Parameter = self.projector.weight_KD  # pyright: ignore[reportAssignmentType]
            weight.grad = None

    @torch.no_grad()
    def end_step(self, is_bad: Tensor) -> None:
        """Move the centre towards the mean of the teacher's logits over all ranks."""
        center_K, total_K = self.get_buffer("center_K"), torch.stack(self.totals).sum(0)
        num_rows = self.num_rows
        if self.shards is not None:
            total_K, num_rows = self.shards.sum(total_K), num_rows * self.shards.world_size
        moved_K = center_K.lerp(total_K / num_rows, 1 - self.center_momentum)
        center_K.copy_(torch.where(is_bad > 0, center_K, moved_K))

    def forward(
        self, emb_VBD: Tensor, emb_LBD: Tensor | None, teacher: nn.Module | None
    ) -> Compared:
        assert emb_LBD is not None and teacher is not None
        with fp32_island(emb_VBD):
            shape = emb_VBD.shape[:2]
            regularized_NW, logits_NK = self.projector(widened(emb_VBD).flatten(0, 1))
            with torch.no_grad():
                target_NK: Tensor = teacher(widened(emb_LBD).flatten(0, 1))[1]
            target_LBK = target_NK.unflatten(0, emb_LBD.shape[:2])
            self.totals.append(target_NK.sum(0))
            self.num_rows += len(target_NK)
            logits_VBK = logits_NK.unflatten(0, shape)
            temp = ramp(self.epoch, *self.temps, self.temp_epochs)
            more = {"center_K": self.get_buffer("center_K"), "teacher_temp": temp}
            loss = distill(logits_VBK, target_LBK, student_temp=self.student_temp, **more)
            if self.needs_whole_batch:
                # The mean over the long views; the teacher's own would add a constant.
                mean_1BW = regularized_NW.unflatten(0, shape)[: len(emb_LBD)].mean(0, keepdim=True)
                mean_GW = gather_utterances(mean_1BW, self.shards)[0]
                std, cov = spread(mean_GW)
                weight = ramp(self.epoch, *self.weights, self.weight_epochs)
                loss = loss + weight * (self.std_weight * std / 2 + self.cov_weight * cov)
            chosen_LB = (target_LBK - self.get_buffer("center_K")).argmax(2)
            accuracy = (logits_VBK.argmax(2) == chosen_LB[0]).to(loss.dtype).mean()
            return Compared(loss, accuracy, chosen_LB.flatten())


def distill(
    logits_VBK: Tensor,
    teacher_LBK: Tensor,
    *,
    center_K: Tensor,
    student_temp: float,
    teacher_temp: float,
) -> Tensor:
    """Return DINO's loss: the mean cross-entropy of all pairs of a teacher's and another view.

    The teacher's views are the first of the student's.
    """
    target_LBK = F.softmax((teacher_LBK - center_K) / teacher_temp, dim=2)
    log_VBK = F.log_softmax(logits_VBK / student_temp, dim=2)
    num_long, num_views = len(target_LBK), len(log_VBK)
    others_LBK = log_VBK.sum(0) - log_VBK[:num_long]  # those of all views but its own
    total_B = -(target_LBK * others_LBK).sum((0, 2))
    return total_B.mean() / (num_long * (num_views - 1))


def spread(x_GW: Tensor) -> tuple[Tensor, Tensor]:
    """Return how far deviations fall short of 1 on average, and the squared covariances.

    The squares of all covariances of two different dimensions are summed and divided by W; their
    sum with the variances' is that of the Gram matrix, which is smaller where G < W.
    """
    x_GW = x_GW - x_GW.mean(0)
    var_W = x_GW.square().sum(0) / (len(x_GW) - 1)
    short = F.relu(1 - (var_W + MIN_VARIANCE).sqrt()).mean()
    gram = x_GW @ x_GW.T if len(x_GW) < x_GW.shape[1] else x_GW.T @ x_GW
    squares = gram.square().sum() / (len(x_GW) - 1) ** 2
    return short, (squares - var_W.square().sum()) / x_GW.shape[1]


def ramp(epoch: float, first: float, last: float, num_epochs: float) -> float:
    """Return `first` at epoch 0, `last` from `num_epochs` on, linear in between."""
    done = min(epoch / num_epochs, 1.0) if num_epochs else 1.0
    return first + (last - first) * done
