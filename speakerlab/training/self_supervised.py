"""Training without labels: a student learns from several views of each utterance, with a teacher.

The teacher is an exponential moving average of the student, and it is the model that is published.
It has no gradient, and moves at the end of each step that is not skipped. It belongs to the state
of the task, so that a checkpoint holds it. Its BatchNorm statistics come from its own forward
passes, not from the student, as in 3D-Speaker.

Letters: B utterances, R crops of an utterance, S samples, P short views of a crop, V views that the
student sees, L long views, D embedding, N rows, K singular values.
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
from speakerlab.training.task import Augment, Task, TaskOutput

lerp_all = torch._foreach_lerp_  # pyright: ignore[reportPrivateImportUsage]


class Views(NamedTuple):
    """Division of the crops of an utterance into views.

    The first crops are long views, uncut; the others are cut into short views.
    """

    num_long: int
    num_short: int
    crop_samples: int
    short_samples: int

    @property
    def shorts_each(self) -> int:
        """Return the number of short views that are cut from a crop, without overlap."""
        return self.crop_samples // self.short_samples

    @property
    def crops_each(self) -> int:
        """Return the number of crops of an utterance."""
        num_cut_crops = math.ceil(self.num_short / self.shorts_each)
        return self.num_long + num_cut_crops

    def cut(self, wave_NS: Tensor) -> tuple[Tensor, Tensor]:
        """Return long views (L, B, S) and short views (num_short, B, short_samples) of crops.

        wave_NS: the crops of an utterance are consecutive rows.
        """
        utterance_shape = (-1, self.crops_each)
        wave_BRS = wave_NS.unflatten(0, utterance_shape)
        wave_RBS = wave_BRS.transpose(0, 1)
        long_LBS = wave_RBS[: self.num_long]

        # Samples behind the last whole short view of a crop are not used.
        used_samples = self.shorts_each * self.short_samples
        cut_RBS = wave_RBS[self.num_long :, :, :used_samples]
        # Cut each crop into views, and list the views of all crops.
        view_shape = (self.shorts_each, self.short_samples)
        view_RBPS = cut_RBS.unflatten(2, view_shape)
        view_RPBS = view_RBPS.transpose(1, 2)
        view_VBS = view_RPBS.flatten(0, 1)
        # The last crop may be cut into more views than are needed.
        return long_LBS, view_VBS[: self.num_short]


class SelfSupervisedTask(Task):
    """An objective, its student and, where the objective has one, its teacher.

    embedder: the model that is published: the teacher or, without a teacher, the model that learns.
    objective: see `losses/__init__.py`. momentum: that of the moving average in the first step; it
    rises to 1 along half a cosine.
    """

    def __init__(
        self,
        *,
        augment: Augment,
        embedder: nn.Module,
        objective: Any,
        views: Views,
        momentum: float,
        precision: Precision,
    ) -> None:
        super().__init__(augment=augment, embedder=embedder, precision=precision)
        self.objective = objective
        self.views = views
        self.first_momentum = momentum
        self.crops_each = views.crops_each
        self.student: nn.Module | None = None
        self.projector: nn.Module | None = None  # the teacher's
        # Student and teacher start with the same weights. The teacher learns by averaging alone.
        if objective.has_teacher:
            self.student = copy.deepcopy(embedder)
            projector: nn.Module = copy.deepcopy(objective.projector)
            self.projector = projector.requires_grad_(False)
            embedder.requires_grad_(False)
        self._begin(0.0, momentum)

    def adopt_loaded_weights(self) -> None:
        """Give the student the weights of the teacher."""
        # Weights from --init are loaded into the embedder, which is the teacher.
        if self.student is not None:
            teacher_state = self.embedder.state_dict()
            self.student.load_state_dict(teacher_state)

    def begin_step(self, step: int, schedule: Schedule, key: int) -> None:
        done = step / schedule.total_steps
        epoch = step / schedule.steps_per_epoch
        # The teacher changes less and less: the share that it takes from the student falls to 0.
        first_share = 1 - self.first_momentum
        share = first_share * (1 + math.cos(math.pi * done)) / 2
        self._begin(epoch, momentum=1 - share)

    def _begin(self, epoch: float, momentum: float) -> None:
        self.momentum = momentum
        # For `measure`: embeddings of long views, and chosen prototypes, per micro-batch.
        self.embeddings: list[Tensor] = []
        self.targets: list[Tensor] = []
        self.objective.begin_step(epoch)

    def drop_gradients(self, *, frozen: bool) -> None:
        self.objective.drop_gradients()

    @torch.no_grad()
    def end_step(self, is_bad: Tensor) -> None:
        """Move the teacher towards the student, and update the objective's statistics."""
        self.objective.end_step(is_bad)
        if self.student is None or self.projector is None:
            return
        teacher: list[Tensor] = [
            *self.embedder.parameters(),
            *self.projector.parameters(),
        ]
        student: list[Tensor] = [
            *self.student.parameters(),
            *self.objective.projector.parameters(),
        ]
        # Whether the step is bad is known only on the device, so there is no branch here: after a
        # bad step, the share is 0.
        is_good = 1 - is_bad
        share = (1 - self.momentum) * is_good
        shares = [share] * len(teacher)
        lerp_all(teacher, student, shares)

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
        num_utterances = long_LBS.shape[1]
        view_shape = (-1, num_utterances)
        embedder: Any = self.embedder
        # With a teacher, the embedder is the teacher, and the student learns by gradients. Without
        # one, the embedder itself does.
        learner: Any = self.student
        if learner is None:
            learner = embedder

        with self.autocast, record_function("step/forward/embedder"):
            # Student and teacher see the same features of the long views.
            feats_NTF = learner.features(long_LBS.flatten(0, 1))
            view_ND = self._embed_views(learner, feats_NTF, short_VBS)
            emb_VBD = view_ND.unflatten(0, view_shape)

            # The teacher sees long views alone. Its embeddings are targets, without gradients.
            emb_LBD: Tensor | None = None
            if self.student is not None:
                with torch.no_grad():
                    emb_ND: Tensor = embedder.embed_features(feats_NTF)
                    emb_LBD = emb_ND.unflatten(0, view_shape)

        with record_function("step/forward/head"):
            compared = self.objective(emb_VBD, emb_LBD, self.projector)

        published_VBD = emb_VBD if emb_LBD is None else emb_LBD
        published_ND = published_VBD.detach().flatten(0, 1)
        self.embeddings.append(published_ND)
        if compared.target_N is not None:
            self.targets.append(compared.target_N)
        # The sums of a step count rows, so the mean becomes a sum over the rows of the batch.
        num_correct = compared.accuracy * len(x_B)
        return TaskOutput(compared.loss, num_correct)

    def _embed_views(
        self, learner: Any, feats_NTF: Tensor, short_VBS: Tensor
    ) -> Tensor:
        """Return the embeddings (N, D) of the views that the student sees, long views first.

        feats_NTF: features of the long views.
        """
        # Long and short views have different lengths, so each kind is a batch of its own.
        embeddings: list[Tensor] = []
        if self.objective.sees_long:
            embeddings.append(learner.embed_features(feats_NTF))
        if len(short_VBS):
            embeddings.append(learner(short_VBS.flatten(0, 1)))
        return torch.cat(embeddings)

    def measure(self, ranks: Ranks) -> dict[str, float]:
        """Return the effective rank of the last step's embeddings of long views.

        Where there are prototypes, also how many of them were chosen as targets. The result is
        empty if an embedding is not finite.
        """
        rank_emb_ND = torch.cat(self.embeddings).float()
        emb_ND = ranks.gather(rank_emb_ND)
        is_finite = bool(emb_ND.isfinite().all())
        if not is_finite:
            return {}
        metrics: dict[str, float] = {}
        metrics["effective_rank"] = round(effective_rank(emb_ND), 3)
        if self.targets:
            rank_target_N = torch.cat(self.targets)
            target_N = ranks.gather(rank_target_N)
            metrics["prototypes"] = len(target_N.unique())
        return metrics


def effective_rank(emb_ND: Tensor) -> float:
    """Return the exponential of the entropy of the singular values of embeddings of unit length.

    From 1, if all are alike, to the smaller of N and D. Roy and Vetterli, The Effective Rank,
    EUSIPCO 2007; for embeddings Garrido et al., RankMe, ICML 2023, arXiv 2210.02885.
    """
    emb_ND = emb_ND.double().cpu()
    unit_ND = nn.functional.normalize(emb_ND, dim=1)
    value_K = torch.linalg.svdvals(unit_ND)
    share_K = value_K / value_K.sum()
    # `entr` is -p * ln(p), and 0 where p is 0.
    entropy = torch.special.entr(share_K).sum()
    return float(entropy.exp())
