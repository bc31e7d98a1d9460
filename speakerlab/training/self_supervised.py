"""Training without labels: a student learns from several views of each utterance, with a teacher.

The teacher, an exponential moving average of the student, is what is published. It has no gradient,
moves at the end of a step that is not skipped, and is in the state of the task, so that a
checkpoint holds it. Its BatchNorm statistics are those of its own passes, as in 3D-Speaker.

Letters: B utterances, R crops of an utterance, S samples, V views that the student sees, L long
views, D embedding, N rows.
"""

import copy
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.profiler import record_function

from speakerlab.core.batch import Batch
from speakerlab.training.distributed import Ranks
from speakerlab.training.precision import Precision
from speakerlab.training.schedules import Schedule
from speakerlab.training.task import Task, TaskOutput

lerp_all = torch._foreach_lerp_  # pyright: ignore[reportPrivateImportUsage]


class Views(NamedTuple):
    """How the crops of an utterance are cut into views: first the long ones, which are whole."""

    num_long: int
    num_short: int
    crop_samples: int
    short_samples: int

    @property
    def shorts_each(self) -> int:
        """Return the number of short views that are cut from one crop, one behind the other."""
        return self.crop_samples // self.short_samples

    @property
    def crops_each(self) -> int:
        """Return the number of crops of an utterance."""
        return self.num_long + math.ceil(self.num_short / self.shorts_each)

    def cut(self, wave_NS: Tensor) -> tuple[Tensor, Tensor]:
        """Return the long views (L, B, S) and the short ones (number, B, shorter S) of crops."""
        wave_RBS = wave_NS.unflatten(0, (-1, self.crops_each)).transpose(0, 1)
        shorts = wave_RBS[self.num_long :, :, : self.shorts_each * self.short_samples]
        shorts = shorts.unflatten(2, (self.shorts_each, self.short_samples)).transpose(1, 2)
        return wave_RBS[: self.num_long], shorts.flatten(0, 1)[: self.num_short]


class SelfSupervisedTask(Task):
    """An objective, its student and, where it has one, the teacher.

    embedder: the teacher, or else what learns. objective: see `losses/__init__.py`. momentum: the
    teacher's share that stays in the first step; it rises to 1 along half a cosine.
    """

    def __init__(
        self,
        *,
        augment: Any,
        embedder: nn.Module,
        objective: Any,
        views: Views,
        momentum: float,
        precision: Precision,
    ) -> None:
        super().__init__(augment=augment, embedder=embedder, precision=precision)
        self.objective, self.views, self.first_momentum = objective, views, momentum
        self.crops_each = views.crops_each
        self.student: nn.Module | None = None
        self.projector: nn.Module | None = None  # the teacher's
        if objective.has_teacher:
            self.student = copy.deepcopy(embedder)
            self.projector = copy.deepcopy(objective.projector).requires_grad_(False)
            embedder.requires_grad_(False)
        self._begin(0.0, momentum)

    def restart(self) -> None:
        """Give the student the weights of the teacher."""
        if self.student is not None:
            self.student.load_state_dict(self.embedder.state_dict())

    def begin_step(self, step: int, schedule: Schedule, key: int) -> None:
        done = step / schedule.total_steps
        momentum = 1 - (1 - self.first_momentum) * (1 + math.cos(math.pi * done)) / 2
        self._begin(step / schedule.steps_per_epoch, momentum)

    def _begin(self, epoch: float, momentum: float) -> None:
        self.momentum = momentum
        self.embeddings: list[Tensor] = []  # of the long views of each micro-batch, for `measure`
        self.targets: list[Tensor] = []
        self.objective.begin_step(epoch)

    def drop_gradients(self, *, frozen: bool) -> None:
        self.objective.drop_gradients()

    @torch.no_grad()
    def end_step(self, is_bad: Tensor) -> None:
        """Move the teacher towards the student, and the objective's statistics."""
        self.objective.end_step(is_bad)
        if self.student is None or self.projector is None:
            return
        learners = self.student, self.objective.projector
        old: list[Tensor] = [p for one in (self.embedder, self.projector) for p in one.parameters()]
        new: list[Tensor] = [p for one in learners for p in one.parameters()]
        share = (1 - self.momentum) * (1 - is_bad)  # on the device, which alone knows `is_bad`
        lerp_all(old, new, [share] * len(old))

    def forward(
        self,
        x_B: Tensor,
        label_B: Tensor,
        margin: float,
        *,
        batch: Batch | None = None,
        frozen: bool = False,
    ) -> TaskOutput:
        """Return the loss of augmented waves (B x R, S); the other arguments are not used."""
        long_LBS, short_VBS = self.views.cut(x_B)
        learner: Any = self.embedder if self.student is None else self.student
        teacher: Any = self.embedder
        with self.autocast, record_function("step/forward/embedder"):
            feats_NTF = learner.features(long_LBS.flatten(0, 1))
            outputs: list[Tensor] = []
            if self.objective.sees_long:
                outputs.append(learner.embed_features(feats_NTF))
            if len(short_VBS):
                outputs.append(learner(short_VBS.flatten(0, 1)))
            num = long_LBS.shape[1]
            emb_VBD, emb_LBD = torch.cat(outputs).unflatten(0, (-1, num)), None
            if self.student is not None:
                with torch.no_grad():
                    emb_LBD = teacher.embed_features(feats_NTF).unflatten(0, (-1, num))
        with record_function("step/forward/head"):
            found = self.objective(emb_VBD, emb_LBD, self.projector)
        self.embeddings.append((emb_VBD if emb_LBD is None else emb_LBD).detach().flatten(0, 1))
        self.targets += [] if found.target_N is None else [found.target_N]
        return TaskOutput(found.loss, found.accuracy * len(x_B))

    def measure(self, ranks: Ranks) -> dict[str, float]:
        """Return how many dimensions the last step's embeddings of long views have in effect.

        And, where there are prototypes, how many of them its targets chose. Nothing of embeddings
        that are not finite.
        """
        emb_ND, row = ranks.gather(torch.cat(self.embeddings).float()), dict[str, float]()
        if bool(emb_ND.isfinite().all()):
            row["effective_rank"] = round(effective_rank(emb_ND), 3)
            if self.targets:
                row["prototypes"] = len(ranks.gather(torch.cat(self.targets)).unique())
        return row


def effective_rank(emb_ND: Tensor) -> float:
    """Return the exponential of the entropy of the singular values of embeddings of unit length.

    From 1, if all are alike, to the smaller of N and D. Roy and Vetterli, The Effective Rank,
    EUSIPCO 2007; for embeddings Garrido et al., RankMe, ICML 2023, arXiv 2210.02885.
    """
    value_K = torch.linalg.svdvals(nn.functional.normalize(emb_ND.double().cpu(), dim=1))
    share_K = value_K / value_K.sum()
    return float(torch.special.entr(share_K).sum().exp())
