"""Turns of a stream that grow until they are complete, and the names of their speakers."""

from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from speakerlab.diarization.live_regions import ROUNDING_SECONDS
from speakerlab.diarization.online import OnlineSpeakers
from speakerlab.diarization.resegmentation import Segment
from speakerlab.inference.known_speakers import Match, Model, match_enrolled


class GrowingTurns:
    """Turns made of segments that come in order of time."""

    def __init__(self) -> None:
        self.complete: list[Segment] = []  # in the order in which they were completed
        # Name of a speaker -> the turn that has not ended yet.
        self._open_turn_of: dict[str, Segment] = {}

    @property
    def current(self) -> list[Segment]:
        """Return the turns that have not ended yet, in order of their starts."""
        return sorted(self._open_turn_of.values())

    def add(self, segment: Segment) -> None:
        """Add a segment to the open turn of its speaker if it touches that, else begin a turn."""
        name = segment.speaker
        turn = self._open_turn_of.get(name)
        if turn is None:
            self._open_turn_of[name] = segment
            return
        if segment.start - turn.end > ROUNDING_SECONDS:
            self.complete.append(turn)
            self._open_turn_of[name] = segment
            return
        confidence = np.average(
            [turn.confidence, segment.confidence],
            weights=[turn.end - turn.start, segment.end - segment.start],
        )
        self._open_turn_of[name] = turn._replace(
            end=segment.end,
            confidence=float(confidence),
        )

    def end_before(self, time: float) -> None:
        """Complete the turns whose last segment ends before a time in seconds."""
        for name, turn in list(self._open_turn_of.items()):
            if turn.end < time:
                self.complete.append(turn)
                del self._open_turn_of[name]


class LiveNames:
    """Names of the speakers of a stream, by their numbers.

    Unknown speakers are "speaker1", "speaker2", ..., in the order of their turns. With `known`, a
    speaker has the name of an enrolled one from the window on with which its mean embedding
    reaches the threshold; the turns before keep the other name.
    """

    def __init__(
        self, speakers: OnlineSpeakers, known_by: Model | None, far: float | None
    ) -> None:
        """known_by: the model with the enrolled speakers; None: all are unknown."""
        self._speakers = speakers
        self._model = known_by
        self._far = far
        self._num_unknown = 0
        self._name_of: dict[int, str] = {}
        self._number_of: dict[str, int] = {}  # also of names that were replaced
        self._match_of: dict[str, Match] = {}  # of known speakers

    def name(self, number: int) -> str:
        """Return the name of a speaker; an unknown one gets it with its first turn."""
        if number not in self._name_of:
            self._num_unknown += 1
            self._set(number, f"speaker{self._num_unknown}")
        return self._name_of[number]

    def recognize(self, number: int) -> None:
        """Name a speaker after the nearest enrolled one, if it is near enough."""
        if self._model is None or self._name_of.get(number) in self._match_of:
            return
        match = self._match(number)
        if not match.is_known:
            return
        # Nobody has the name of another speaker, except of one that was merged into this one.
        owner = self._number_of.get(match.name, number)
        if self._speakers.remaining(owner) == number:
            self._match_of[match.name] = match
            self._set(number, match.name)

    def embeddings(self, names: Iterable[str]) -> dict[str, np.ndarray]:
        """Return name -> unit vector, float32, for the names of turns in order of appearance."""
        emb_of: dict[str, np.ndarray] = {}
        for name in names:
            # The first turn of a speaker decides the order.
            if name in emb_of:
                continue
            number = self._number_of[name]
            direction_D = self._speakers.direction_D(number)
            emb_of[name] = direction_D.astype(np.float32)
        return emb_of

    def matches(self, names: Iterable[str]) -> dict[str, Match]:
        """Return name -> best match among the enrolled speakers; {} without `known`."""
        if self._model is None:
            return {}
        match_of: dict[str, Match] = {}
        for name in names:
            if name in self._match_of:
                match_of[name] = self._match_of[name]
            else:
                match = self._match(self._number_of[name])
                match_of[name] = replace(match, is_known=False)
        return match_of

    def _match(self, number: int) -> Match:
        """Return the best match of a speaker among the enrolled ones."""
        emb_D = self._speakers.direction_D(number)
        matches = match_enrolled({"": emb_D}, self._model, far=self._far)
        return matches[""]

    def _set(self, number: int, name: str) -> None:
        self._name_of[number] = name
        self._number_of[name] = number
