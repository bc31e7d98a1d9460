"""How a back end is written: `mean+lda+length+plda+asnorm`.

In: steps joined by "+". Out: the steps, in an order that can be run, and a sentence for the report.
"""

from dataclasses import dataclass

TRANSFORMS = {  # step -> what it does to embeddings
    "mean": "centred on the development mean",
    "lda": "projected to {num_dims} dimensions by LDA",
    "whiten": "whitened",
    "length": "scaled to length 1",
}
SCORERS = {
    "cosine": "the cosine of the embeddings",
    "plda": "the log-likelihood ratio of a two-covariance PLDA",
}
NORMALISATIONS = {"snorm": "S-Norm", "asnorm": "AS-Norm"}
LEARNED = {"mean", "lda", "whiten", "plda", *NORMALISATIONS}


@dataclass(frozen=True)
class Spec:
    """A back end that can be run."""

    text: str
    transforms: tuple[str, ...]
    scorer: str
    normalisation: str | None

    @classmethod
    def read(cls, text: str) -> "Spec":
        """Raises ValueError for an unknown step and for a wrong order."""
        steps = text.split("+")
        for step in steps:
            if step not in {*TRANSFORMS, *SCORERS, *NORMALISATIONS}:
                known = ", ".join([*TRANSFORMS, *SCORERS, *NORMALISATIONS])
                raise ValueError(
                    f"backend: unknown step in '{text}', got '{step}'; known: {known}, and qmf at "
                    "the end; join steps by +, set back ends apart by blanks"
                )
        normalisation = steps.pop() if steps[-1] in NORMALISATIONS else None
        scorer = steps.pop() if steps else ""
        is_twice = len(set(steps)) < len(steps)
        if scorer not in SCORERS or not TRANSFORMS.keys() >= set(steps) or is_twice:
            raise ValueError(
                f"backend: steps out of order, got '{text}'; write {', '.join(TRANSFORMS)} as "
                f"wished, then {' or '.join(SCORERS)}, then {' or '.join(NORMALISATIONS)} or none, "
                "then qmf or none, each once"
            )
        return cls(text, tuple(steps), scorer, normalisation)

    @property
    def learned(self) -> tuple[str, ...]:
        """The steps that need a development set."""
        return tuple(step for step in self.text.split("+") if step in LEARNED)

    def protocol(
        self,
        *,
        num_dims: int = 0,
        num_adapted: int = 0,
        num_nearest: int = 0,
        asked_for: int = 0,
        num_utterances: int = 0,
        num_speakers: int = 0,
    ) -> str:
        """The steps and what they were learned from, to follow what a trial list compares.

        num_nearest: of the cohort, which has a row for each of the speakers.
        """
        parts = [f"scored by {SCORERS[self.scorer]}"]
        if num_adapted and self.scorer == "plda":
            parts[0] += f", adapted to {num_adapted:,} utterances without speakers"
        if self.transforms:
            done = [TRANSFORMS[step].format(num_dims=num_dims) for step in self.transforms]
            parts.append(f"embeddings are first {', then '.join(done)}")
        if self.normalisation:
            capped = f" ({asked_for:,} were asked for)" if num_nearest < asked_for else ""
            nearest = f"the {num_nearest:,}{capped} nearest of "
            parts.append(
                f"{NORMALISATIONS[self.normalisation]} with "
                f"{nearest if self.normalisation == 'asnorm' else ''}a cohort of "
                f"{num_speakers:,} speakers' mean embeddings"
            )
        if self.learned:
            parts.append(
                f"learned from {num_utterances:,} utterances of {num_speakers:,} speakers that "
                "occur in no trial"
            )
        return "; ".join(parts)
