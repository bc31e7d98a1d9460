"""Types of the configuration's values, and the sections that other sections contain."""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from speakerlab.core.powerset import MAX_SPEAKERS
from speakerlab.data.codecs import check_codec

STRICT = ConfigDict(
    extra="forbid",
    strict=True,
    frozen=True,
    allow_inf_nan=False,
)
MOST = 10**9  # products of larger numbers overflow
Positive = Annotated[float, Field(gt=0, le=MOST)]
Share = Annotated[float, Field(ge=0, le=1)]
Count = Annotated[int, Field(gt=0, le=MOST)]
CountFromZero = Annotated[int, Field(ge=0)]
Ends = tuple[float, float]  # lowest and highest value that is drawn
Factors = tuple[float, ...]


def _ascending(ends: Ends) -> Ends:
    low, high = ends
    if low > high:
        raise ValueError("is [high, low]; swap the two")
    return ends


def _from_one(speeds: Factors) -> Factors:
    begins_with_one = speeds[:1] == (1.0,)
    has_repeats = len(set(speeds)) < len(speeds)
    if has_repeats or not begins_with_one:
        raise ValueError(
            "does not begin with 1.0, or repeats a speed; write [1.0, 0.9, 1.1]"
        )
    return speeds


Range = Annotated[Ends, AfterValidator(_ascending)]
NotNegative = Annotated[float, Field(ge=0, le=MOST)]
Codec = Annotated[str, AfterValidator(check_codec)]
Codecs = Annotated[tuple[Codec, ...], Field(min_length=1)]
Speed = Annotated[float, Field(ge=0.5, le=2)]
Speeds = Annotated[tuple[Speed, ...], AfterValidator(_from_one)]
Voices = Annotated[int, Field(ge=1, le=32)]
VoicesRange = Annotated[tuple[Voices, Voices], AfterValidator(_ascending)]
LocalSpeakers = Annotated[int, Field(ge=1, le=MAX_SPEAKERS)]
SpeakersRange = Annotated[
    tuple[LocalSpeakers, LocalSpeakers], AfterValidator(_ascending)
]
Label = Annotated[str, Field(pattern=r"^\w+$")]


class Section(BaseModel):
    """Part of the configuration; unknown keys and wrong types are refused."""

    model_config = STRICT


class Component(Section):
    """Component built by name; `args` are the arguments of its constructor."""

    name: str
    args: dict[str, Any] = {}


class KindOdds(Section):
    """Odds of each kind of noise; training reports kinds without recordings."""

    noise: NotNegative = 1.0
    music: NotNegative = 1.0
    speech: NotNegative = 1.0


class ViewsConfig(Section):
    """Views of an utterance in self-supervised training; long ones have `data.crop_seconds`."""

    long: Count = 2
    short: CountFromZero = 4
    # Cut out of crops of `data.crop_seconds`, as many as fit.
    short_seconds: Positive = 2.0
    # Number of long views, the first ones, that are not augmented.
    clean: CountFromZero = 0
    teacher_momentum: Share = 0.996  # in the first step; rises to 1


class DistilConfig(Section):
    """What a student learns from its teachers, in the task `distil`."""

    # Experiments, model folders, hub:NAME or .onnx files; several are joined to one target.
    teachers: tuple[str, ...] = ()
    # utterance: the teacher has embedded each whole utterance before the training. crop: it embeds
    # each crop during the training, so a changed voice has a target of its own.
    targets: Literal["utterance", "crop"] = "utterance"
    # With `crop`. clean: the crop in its changed voice, without room, noise and channel. augmented:
    # what the student hears.
    hears: Literal["clean", "augmented"] = "clean"
    # With `crop` and `clean`: a batch has so many augmentations of each crop, and the teacher hears
    # the crop only once.
    views: Count = 1
    # Weights of losses/distillation.py.
    losses: dict[Label, NotNegative] = {
        "cosine": 1.0,
        "relations": 4.0,
        "contrast": 0.5,
    }
    temperature: Positive = 0.1  # of the loss `contrast`
    # keep: the student is published with a projection to the teacher's space, where the embeddings
    # of both can be compared. drop: where dimensions differ, the training has a linear layer that
    # is not published. auto: keep with one teacher.
    projection: Literal["auto", "keep", "drop"] = "auto"
    # Written by training: dimensions of the projection that is kept; null: none.
    target_dim: Count | None = None
    # Weight of the distance between frames of the student and the teacher, before their pooling,
    # with one PyTorch teacher; 0: only embeddings are compared. With `utterance`, they are stored.
    frame_weight: NotNegative = 0.0
    # Weight of the head and its loss, which need labels; 0: labels are not used.
    label_weight: NotNegative = 0.0

    @property
    def keeps_projection(self) -> bool:
        """Return whether the student's embeddings are to be compared with its teacher's."""
        if self.projection == "auto":
            return len(self.teachers) == 1
        return self.projection == "keep"


class ConversationsConfig(Section):
    """Conversations that the task `segmentation` simulates from recordings of single speakers.

    Times are means of exponential distributions, in seconds.
    """

    # Fewest and most speakers of a crop, equally often.
    speakers: SpeakersRange = (1, 3)
    turn_seconds: Positive = 3.0
    pause_seconds: Positive = 0.4
    # Share of the turns that begin before the turn before has ended, and for how long both speak.
    overlap_prob: Share = 0.5
    overlap_seconds: Positive = 2.0
    # Share of the turns during which another speaker says a word or two.
    backchannel_prob: Share = 0.3
    # Standard deviation of the level of a speaker, in dB.
    level_db: NotNegative = 4.0


class AugmentConfig(Section):
    """Augmentation of a training crop. The first speed is 1.

    SNRs and numbers of voices span the values in Kaldi's recipes for MUSAN
    (egs/voxceleb/v2/run.sh): noise 0 to 15 dB, music 5 to 15 dB, 3 to 7 voices at 13 to 20 dB.
    """

    speeds: Speeds = (1.0, 0.9, 1.1)
    # on: a speaker at another speed counts as another speaker.
    speed_classes: Literal["auto", "on", "off"] = "auto"
    # New voices, for a teacher that hears them: their labels would be wrong.
    pitch_prob: Share = 0.0
    pitch_semitones: Range = (-3.0, 3.0)
    formants_prob: Share = 0.0
    formant_range: Range = (0.85, 1.15)
    room_prob: Share = 0.4
    noise_prob: Share = 0.4
    snr_db: Range = (0.0, 15.0)  # of the kind `noise`
    music_snr_db: Range = (5.0, 15.0)
    babble_snr_db: Range = (13.0, 20.0)  # of the sum
    # Recordings of the kind `speech` that are summed.
    babble_voices: VoicesRange = (3, 7)
    kind_odds: KindOdds = KindOdds()
    reencode_prob: Share = 0.0  # by one of `codecs`, before all others
    codecs: Codecs = (
        "mp3:16k",
        "mp3:32k",
        "opus:8k",
        "opus:16k",
        "gsm",
    )
    telephone_prob: Share = 0.0  # 300 to 3400 Hz
    codec_prob: Share = 0.0  # 8 kHz and G.711, mu-law or A-law
    spec: dict[str, Any] = {}  # args of SpecAugment
    # Further augmentations, after all others and in this order.
    more: dict[Label, Component] = {}
