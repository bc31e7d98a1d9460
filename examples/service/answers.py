"""Answers of the service, as JSON; the descriptions are those of the OpenAPI page."""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, Field

Warnings = Annotated[
    list[str],
    Field(
        description="Doubts about the recordings, a line each, such as less than 0.5 s of speech"
    ),
]
Score = Annotated[
    float,
    # Of equal embeddings, float32 gives 1.0000001.
    AfterValidator(lambda score: min(max(score, -1.0), 1.0)),
    Field(description="Cosine of the two embeddings, from -1 to 1"),
]
Threshold = Annotated[
    float | None,
    Field(
        description="Cosine from which it is a yes; null for a model without calibration"
    ),
]
Sha256 = Annotated[
    str,
    Field(
        description="Model of the embeddings; those of two models cannot be compared"
    ),
]
Time = Annotated[float, Field(description="Seconds since 1970-01-01 UTC")]


class Error(BaseModel):
    """Refusal."""

    detail: Annotated[str, Field(description="One line: the problem and what to do")]


class Embedding(BaseModel):
    """Embedding of a recording."""

    embedding: Annotated[
        list[float], Field(description="float32 values, not scaled to unit length")
    ]
    seconds: Annotated[float, Field(description="Length of the recording in seconds")]
    model_sha256: Sha256
    warnings: Warnings


class Verification(BaseModel):
    """Comparison of two recordings."""

    score: Score
    llr: Annotated[
        float | None,
        Field(
            description="Natural logarithm of the likelihood ratio of the same speaker"
        ),
    ]
    threshold: Threshold
    same: Annotated[
        bool | None,
        Field(
            description="Decision; null without calibration, or without speech in both"
        ),
    ]
    speech_seconds: Annotated[
        list[float], Field(description="Seconds of speech in both recordings")
    ]
    warnings: Warnings


class Enrolment(BaseModel):
    """Speaker that was stored."""

    name: str
    replaced: Annotated[
        bool, Field(description="A speaker of this name was enrolled before")
    ]
    num_recordings: int
    seconds: Annotated[float, Field(description="Audio of all recordings in seconds")]
    model_sha256: Sha256
    warnings: Warnings


class Speaker(BaseModel):
    """Enrolled speaker."""

    name: str
    num_recordings: int
    seconds: Annotated[float, Field(description="Audio of all recordings in seconds")]
    enrolled_at: Time


class Speakers(BaseModel):
    """Page of the enrolled speakers, in order of name."""

    total: int
    speakers: list[Speaker]


class Candidate(BaseModel):
    """Enrolled speaker and its score."""

    name: str
    score: Score


class Identification(BaseModel):
    """Enrolled speakers ranked for a recording."""

    name: Annotated[
        str | None,
        Field(
            description="The best speaker; null if it is none of them, or without speech"
        ),
    ]
    known: Annotated[
        bool | None,
        Field(
            description="The best score reaches the threshold; null without calibration or speech"
        ),
    ]
    threshold: Threshold
    speech_seconds: Annotated[
        float, Field(description="Seconds of speech in the recording")
    ]
    ranking: Annotated[list[Candidate], Field(description="The best first")]
    warnings: Warnings


class Diarization(BaseModel):
    """Job that finds who spoke when."""

    id: str
    state: Literal["queued", "running", "done", "failed"]
    recording: Annotated[str, Field(description="Name of the uploaded file")]
    created_at: Time
    finished_at: Time | None
    attempts: Annotated[
        int, Field(description="Starts; more than 1 after a restart of the service")
    ]
    result: Annotated[
        dict[str, Any] | None,
        Field(
            description="seconds: length of the recording; speakers: name -> seconds of speech;"
            " segments: start and end in seconds, and speaker; warnings: doubts about the"
            " recording"
        ),
    ]
    error: Annotated[str | None, Field(description="Why it failed, in one line")]


class Health(BaseModel):
    """State of the worker that answers."""

    live: bool
    ready: Annotated[bool, Field(description="Model and databases can be used")]
    model_sha256: Sha256
    sample_rate: Annotated[int, Field(description="Of the model, in Hz")]
    embedding_dimensions: int
    calibrated: Annotated[
        bool, Field(description="Whether decisions are made without a threshold")
    ]
