"""Configurations of 3D-Speaker and WeSpeaker.

In: a config.yaml, read as plain data. Out: the toolkit, the front end and the head. Needs no torch,
so that `speakerlab import --help` is quick.
"""

import csv
import logging
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from speakerlab.config.layers import parse_yaml
from speakerlab.core.reading import open_text, refuse_no_text

log = logging.getLogger(__name__)
Toolkit = Literal["3dspeaker", "wespeaker"]
# The names of the toolkits in messages.
TITLES: Mapping[Toolkit, str] = {
    "3dspeaker": "3D-Speaker",
    "wespeaker": "WeSpeaker",
}
# Features of each toolkit, which no checkpoint records. 3D-Speaker applies torchaudio's defaults to
# waves in [-1, 1] (process/processor.py: FBank); WeSpeaker multiplies by 32768 first and uses a
# Hamming window (dataset/processor.py: compute_fbank), or its front end tfmel.
FRONTENDS: Mapping[str, Mapping[str, Any]] = {
    "3dspeaker": {"window": "povey", "scale": 1.0, "dither": 0.0},
    "wespeaker": {"window": "hamming", "scale": 32768.0, "dither": 0.0},
    "tfmel": {"kind": "tfmel", "window": "hamming", "scale": 1.0, "high_freq": 7600.0},
}
# The settings of tfmel in the published ReDimNet2, the only ones that we support.
TFMEL = {
    "norm_signal": True,
    "do_preemph": True,
    "n_fft": 512,
    "win_length": 400,
    "hop_length": 160,
    "f_min": 20,
    "f_max": 7600,
}
TFMEL_RATE = 16000  # Hz; its frames are given in samples
# The arguments of the filter banks of both toolkits. Another one is of a changed toolkit, whose
# features we do not compute.
EXTRACTOR = "speakerlab.process.processor.FBank"
EXTRACTOR_ARGS = ("n_mels", "sample_rate", "mean_nor")
FBANK_ARGS = ("num_mel_bins", "frame_length", "frame_shift", "dither")
CMVN_ARGS = ("norm_mean", "norm_var")
TFMEL_ARGS = (*TFMEL, "n_mels", "sample_rate")
REFERENCE = r"<([a-zA-Z]\w*)>"  # in 3D-Speaker: the value of another top-level key
# Keys anywhere in a configuration that mean the same as a setting of features. They count only if
# the setting itself is missing.
RATE_KEYS = re.compile(
    r"(.*_)?(re)?sampl(e|ing)_?(rate|freq|frequency)|sr|fs", re.IGNORECASE
)
BIN_KEYS = re.compile(
    r"(num_|n_)?(mels?|mel_bins|fbank_bins)|fbank_dim|feat_dim|feature_dim",
    re.IGNORECASE,
)
LENGTH_KEYS = re.compile(r"frame_length(_ms)?|frame_len")
SHIFT_KEYS = re.compile(r"frame_shift(_ms)?|frame_hop")
# Keys of the size of embeddings, in the arguments of the models of both toolkits.
SIZE_KEYS = ("embedding_size", "embed_dim", "lin_neurons")
# Tags of HyperPyYAML, which SpeechBrain's configurations are written in.
SPEECHBRAIN_TAG = re.compile(rb"!(new|ref|name|apply|copy|include|module):?[ \w]")
DEEPEST = 20  # sections within sections; a YAML file may contain itself
# WeSpeaker's copies of 3D-Speaker's models take 3D-Speaker's features; these are the names of their
# folders and archives (cli/hub.py, cli/speaker.py).
CONVERTED = ("campplus_cn_common_200k", "eres2net_cn_commom_200k")
MAX_SIZE = 1_000_000  # of features, in Hz, ms or bins
SPEEDS = (1.0, 0.9, 1.1)  # the order in which both toolkits number a speed's speakers
# The names of heads: theirs (of configurations of both toolkits) -> ours.
HEADS = {
    "arc_margin": "aam_softmax",
    "add_margin": "am_softmax",
    "ArcMarginLoss": "aam_softmax",
    "AddMarginLoss": "am_softmax",
}


@dataclass(frozen=True)
class ForeignConfig:
    """The content of a config.yaml; `toolkit` is None if there is none."""

    path: Path | None
    toolkit: Toolkit | None
    values: Mapping[str, Any]

    @property
    def feat_dim(self) -> int:
        """Return the number of mel bins."""
        if self.kind == "tfmel":
            tfmel = self._section("dataset_args", "tfmel_args")
            num_bins = tfmel.get("n_mels", 80)
            return self._whole_number("dataset_args.tfmel_args.n_mels", num_bins)
        if self.toolkit == "3dspeaker":
            model = self._section("embedding_model", "args")
            key, num_bins = self._extractor_setting(
                "n_mels",
                otherwise="fbank_dim",
                usual=model.get("feat_dim", 80),
            )
            return self._whole_number(key, self._value(num_bins))
        fbank = self._section("dataset_args", "fbank_args")
        model = self._section("model_args")
        input_size = model.get("feat_dim", 80)
        num_bins = fbank.get("num_mel_bins", input_size)
        return self._whole_number("dataset_args.fbank_args.num_mel_bins", num_bins)

    @property
    def kind(self) -> str:
        """Return WeSpeaker's name of the front end."""
        data = self._section("dataset_args")
        return str(data.get("frontend", "fbank"))

    @property
    def pooling(self) -> str | None:
        """Return our name of WeSpeaker's pooling."""
        model = self._section("model_args")
        name = model.get("pooling_func")
        if name is None:
            return None
        return str(name).lower()

    def frontend(self, name: str) -> dict[str, Any]:
        """Return the arguments of our Fbank; ValueError if it does not compute these features.

        name: a key of `FRONTENDS`. Only the arguments of the toolkit's own filter bank are read.
        Wrong features give plausible, but bad embeddings, so anything that our Fbank does not
        compute exactly is refused by its key.
        """
        if self.toolkit == "3dspeaker":
            settings = self._features_of_3dspeaker()
        else:
            settings = self._features_of_wespeaker()
        if self.kind == "tfmel":
            name = "tfmel"
        return {
            **FRONTENDS[name],
            "num_mel_bins": self.feat_dim,
            **settings,
        }

    def _features_of_3dspeaker(self) -> dict[str, Any]:
        """Return the arguments of our Fbank that the extractor of 3D-Speaker sets."""
        where = "feature_extractor.args"
        extractor = self._section("feature_extractor")
        args = self._section("feature_extractor", "args")
        name = extractor.get("obj", EXTRACTOR)
        if name != EXTRACTOR:
            raise self._refusal("feature_extractor.obj", name)
        self._refuse_unknown(where, args, EXTRACTOR_ARGS)

        key, rate = self._extractor_setting(
            "sample_rate", otherwise="sample_rate", usual=16000
        )
        sample_rate = self._whole_number(key, rate)
        if "n_mels" not in args:
            self._refuse_synonyms(BIN_KEYS, self.feat_dim, f"{where}.n_mels")
        if "sample_rate" not in args:
            self._refuse_synonyms(RATE_KEYS, sample_rate, f"{where}.sample_rate")
        assumed = {"n_mels": self.feat_dim, "sample_rate": sample_rate}
        for argument, value in assumed.items():
            if argument not in args:
                log.warning(
                    "%s: has no %s.%s; assumes %d", self.path, where, argument, value
                )
        self._refuse_other_rate_of_files(key, sample_rate)
        # The mean is subtracted only if `mean_nor` is set. A configuration without arguments of an
        # extractor is of a published model, which subtracts it.
        mean_norm = self._flag(f"{where}.mean_nor", args.get("mean_nor", not args))
        return {"sample_rate": sample_rate, "mean_norm": mean_norm}

    def _refuse_other_rate_of_files(self, key: str, sample_rate: int) -> None:
        """Refuse files of another rate than that of 3D-Speaker's extractor, set by `key`.

        The extractor does not resample: its mel bins would have other frequencies.
        """
        reader = self._section("wav_reader", "args")
        rate_of_files = self._value(reader.get("sample_rate", sample_rate))
        if rate_of_files != sample_rate:
            raise ValueError(
                f"{self.path}: {key} is {sample_rate}, but wav_reader.args.sample_rate"
                f" {rate_of_files}; correct the configuration"
            )

    def _refuse_other_features_of_wespeaker(self) -> None:
        """Refuse settings of WeSpeaker's features that our Fbank cannot follow."""
        where = "dataset_args"
        fbank = self._section(where, "fbank_args")
        cmvn = self._section(where, "cmvn_args")
        tfmel = self._section(where, "tfmel_args")
        self._refuse_unknown(f"{where}.fbank_args", fbank, FBANK_ARGS)
        self._refuse_unknown(f"{where}.cmvn_args", cmvn, CMVN_ARGS)
        if self.kind == "tfmel":
            self._refuse_unknown(f"{where}.tfmel_args", tfmel, TFMEL_ARGS)
        has_our_tfmel = TFMEL.items() <= tfmel.items()
        if self.kind not in ("fbank", "tfmel"):
            raise self._refusal(f"{where}.frontend", self.kind)
        if self.kind == "tfmel" and not has_our_tfmel:
            raise self._refusal(
                f"{where}.tfmel_args", dict(tfmel), title="frontend: tfmel"
            )
        if self._flag(f"{where}.cmvn_args.norm_var", cmvn.get("norm_var", False)):
            raise self._refusal(f"{where}.cmvn_args.norm_var", True)
        # Features that another program, such as Kaldi, has computed.
        if self.values.get("data_type") == "feat":
            raise self._refusal("data_type", "feat")

    def _features_of_wespeaker(self) -> dict[str, Any]:
        """Return the arguments of our Fbank that `dataset_args` of WeSpeaker sets."""
        where = "dataset_args"
        data = self._section(where)
        fbank = self._section(where, "fbank_args")
        tfmel = self._section(where, "tfmel_args")
        self._refuse_other_features_of_wespeaker()
        if self.path is not None and not data:
            log.warning(
                "%s: has no dataset_args; assumes 16000 Hz, %d mel bins, mean subtracted",
                self.path,
                self.feat_dim,
            )

        rate_key = f"{where}.resample_rate"
        sample_rate = self._whole_number(rate_key, data.get("resample_rate", 16000))
        mean_norm = self.subtracts_mean()
        if self.kind == "tfmel":
            # It subtracts the mean itself.
            mean_norm = True
            rate_of_tfmel = tfmel.get("sample_rate", sample_rate)
            if not rate_of_tfmel == sample_rate == TFMEL_RATE:
                raise self._refusal(rate_key, sample_rate, title="frontend: tfmel")
        frame_length = fbank.get("frame_length", 25)
        frame_shift = fbank.get("frame_shift", 10)
        self._refuse_synonyms_of_wespeaker(sample_rate)
        return {
            "sample_rate": sample_rate,
            "frame_length_ms": self._milliseconds("frame_length", frame_length),
            "frame_shift_ms": self._milliseconds("frame_shift", frame_shift),
            "mean_norm": mean_norm,
        }

    def _refuse_synonyms_of_wespeaker(self, sample_rate: int) -> None:
        """Refuse settings of WeSpeaker's features that are under other keys."""
        data = self._section("dataset_args")
        if "resample_rate" not in data:
            self._refuse_synonyms(RATE_KEYS, sample_rate, "dataset_args.resample_rate")
        if self.kind != "fbank":
            return
        fbank = self._section("dataset_args", "fbank_args")
        # Setting, its other names, and the value that it has without its key.
        settings = (
            ("num_mel_bins", BIN_KEYS, self.feat_dim),
            ("frame_length", LENGTH_KEYS, 25),
            ("frame_shift", SHIFT_KEYS, 10),
        )
        for name, synonyms, assumed in settings:
            if name not in fbank:
                key = f"dataset_args.fbank_args.{name}"
                self._refuse_synonyms(synonyms, assumed, key)

    def subtracts_mean(self) -> bool:
        """Return whether the mean over time of WeSpeaker's features is subtracted."""
        cmvn = self._section("dataset_args", "cmvn_args")
        data = self._section("dataset_args")
        applies_cmvn = self._flag("dataset_args.cmvn", data.get("cmvn", True))
        norm_mean = cmvn.get("norm_mean", True)
        return applies_cmvn and self._flag(
            "dataset_args.cmvn_args.norm_mean", norm_mean
        )

    def lora_alpha(self) -> float:
        """Return the `lora_alpha` of WeSpeaker's adapters."""
        args = self._section("dataset_args", "w2vbert_args", "lora_config_args")
        alpha = args.get("lora_alpha", 32)  # the default of its front end
        if isinstance(alpha, bool) or not isinstance(alpha, int | float):
            key = "dataset_args.w2vbert_args.lora_config_args.lora_alpha"
            raise ValueError(f"{self.path}: {key}: {alpha!r} is not a number")
        return float(alpha)

    def whisper_blocks(self) -> tuple[int, int]:
        """Return the first and the last block of Whisper that are pooled, counted from 0."""
        args = self._section("dataset_args", "whisper_encoder_args")
        where = "dataset_args.whisper_encoder_args"
        # The defaults of WeSpeaker's front end.
        first = args.get("layer_st", 16)
        last = args.get("layer_ed", 23)
        return (
            self._whole_number(f"{where}.layer_st", first),
            self._whole_number(f"{where}.layer_ed", last),
        )

    def head(self) -> dict[str, Any] | None:
        """Return our head that matches the published one, None if we have no such kind."""
        if self.toolkit == "3dspeaker":
            args = self._section("loss", "args")
            # A class with its module, such as `speakerlab.loss.margin_loss.ArcMarginLoss`.
            loss = self._section("loss")
            _, _, kind = str(loss.get("obj")).rpartition(".")
        else:
            args = self._section("projection_args")
            kind = str(args.get("project_type"))
        if kind not in HEADS:
            return None
        name = HEADS[kind]
        scale = self._value(args.get("scale", 32.0))
        our_args: dict[str, Any] = {"scale": scale}
        # Only an angular margin has an easy variant.
        if name == "aam_softmax":
            easy_margin = self._value(args.get("easy_margin", False))
            our_args["easy_margin"] = bool(easy_margin)
        return {"name": name, "args": our_args}

    def check_size(self, embed_dim: int) -> None:
        """Raise ValueError if the configuration is of a model with embeddings of another size."""
        keys = ("model_args",)
        if self.toolkit == "3dspeaker":
            keys = ("embedding_model", "args")
        args = self._section(*keys)
        for name in SIZE_KEYS:
            size = self._value(args.get(name, embed_dim))
            if size != embed_dim:
                raise ValueError(
                    f"{self.path}: {'.'.join(keys)}.{name} is {size}, but the embeddings"
                    f" of the checkpoint have {embed_dim} dimensions; give the"
                    " configuration of this checkpoint"
                )

    def _refuse_synonyms(
        self, synonyms: re.Pattern[str], assumed: float, setting: str
    ) -> None:
        """Refuse a key that gives another value to a setting that is missing.

        assumed: the value that the setting has without its key.
        """
        for key, value in _values_by_key(self.values):
            *_, name = key.split(".")
            is_synonym = synonyms.fullmatch(name) is not None
            if is_synonym and self._value(value) not in (None, assumed):
                raise ValueError(
                    f"{self.path}: {key} is {value}, but {setting} is missing, for which"
                    f" {assumed:g} would be assumed; add {setting}: VALUE to this file"
                )

    def _section(self, *keys: str) -> Mapping[str, Any]:
        """Return the section at a path of keys, empty if missing; ValueError if it is none."""
        section: Any = self.values
        for key in keys:
            section = self._value(section.get(key))
            if section is None:
                section = {}
            if not isinstance(section, Mapping):
                raise ValueError(
                    f"{self.path}: {'.'.join(keys)}: {key} has the value {section!r}, not"
                    " keys and values; correct it"
                )
        return section

    def _value(self, value: object) -> Any:
        """Return a value; follow 3D-Speaker's references to other keys, such as <sample_rate>."""
        followed: list[str] = []
        while self.toolkit == "3dspeaker" and isinstance(value, str):
            match = re.fullmatch(REFERENCE, value)
            if not match:
                break
            key = match[1]
            if key in followed or key not in self.values:
                problem = "itself" if key in followed else "no key of this file"
                raise ValueError(
                    f"{self.path}: {value}: refers to {problem}; correct it"
                )
            followed.append(key)
            value = self.values[key]
        return value

    def _extractor_setting(
        self, name: str, *, otherwise: str, usual: object
    ) -> tuple[str, object]:
        """Return the key and the value of an argument of 3D-Speaker's extractor.

        Without it, the top-level key `otherwise` is taken, or the usual value.
        """
        args = self._section("feature_extractor", "args")
        if name in args:
            key = f"feature_extractor.args.{name}"
            return key, self._value(args[name])
        top_level_value = self.values.get(otherwise, usual)
        return otherwise, self._value(top_level_value)

    def _refuse_unknown(
        self, where: str, section: Mapping[str, Any], names: Collection[str]
    ) -> None:
        """Refuse an argument of features that the toolkit's own code does not have."""
        for name, value in section.items():
            if name not in names:
                raise self._refusal(f"{where}.{name}", value)

    def _refusal(self, key: str, value: object, *, title: str = "") -> ValueError:
        """Return the error of a setting whose features our Fbank does not compute."""
        setting = f"{key}: {value}"
        if title:
            setting = f"{title}, {setting}"
        return ValueError(
            f"{self.path}: {setting}: not the features of a published"
            f" {TITLES[self.toolkit or 'wespeaker']} model; such models cannot be"
            " imported"
        )

    def _whole_number(self, key: str, value: object) -> int:
        """Return a size of features; ValueError for anything but a whole number in the range."""
        # Not `isinstance`: True is an instance of int.
        is_whole = type(value) is int
        if not is_whole or not 1 <= value <= MAX_SIZE:
            raise ValueError(
                f"{self.path}: {key}: {value!r} is not a whole number from 1 to"
                f" {MAX_SIZE}; correct it"
            )
        return value

    def _milliseconds(self, name: str, value: object) -> float:
        """Return the length or the shift of frames; ValueError if it is no number."""
        if type(value) is int:
            value = float(value)
        if type(value) is not float or not 0 < value <= MAX_SIZE:
            raise ValueError(
                f"{self.path}: dataset_args.fbank_args.{name}: {value!r} is not a number"
                " of milliseconds; correct it"
            )
        return value

    def _flag(self, key: str, value: object) -> bool:
        """Return a flag; ValueError for text, which would always count as true."""
        value = self._value(value)
        if not isinstance(value, bool):
            raise ValueError(
                f"{self.path}: {key}: {value!r} is neither true nor false; correct it"
            )
        return value


def _values_by_key(
    values: object, *, where: str = "", depth: int = 0
) -> Iterator[tuple[str, object]]:
    """Yield the path of keys and the value of everything in a configuration but sections."""
    if depth > DEEPEST:
        return
    children: Iterable[tuple[str, object]]
    if isinstance(values, Mapping):
        children = [(f"{where}.{key}", value) for key, value in values.items()]
    elif isinstance(values, list):
        children = [(where, value) for value in values]
    else:
        yield where.removeprefix("."), values
        return
    for key, value in children:
        yield from _values_by_key(value, where=key, depth=depth + 1)


def read_config(path: Path | None) -> ForeignConfig:
    """Read a config.yaml as plain data; ValueError, one line, for a tag that names code."""
    if path is None:
        return ForeignConfig(None, None, {})
    text = path.read_bytes()
    refuse_no_text(text, path)
    if SPEECHBRAIN_TAG.search(text):
        raise ValueError(
            f"{path}: is a configuration of SpeechBrain (HyperPyYAML), whose features we"
            " do not compute; models of 3D-Speaker and WeSpeaker can be imported"
        )
    values = parse_yaml(text, str(path), yaml.SafeLoader)
    if not isinstance(values, dict):
        values = {}
    # Each toolkit has its own section for the model.
    toolkit: Toolkit | None = None
    if "embedding_model" in values:
        toolkit = "3dspeaker"
    elif "model_args" in values:
        toolkit = "wespeaker"
    return ForeignConfig(path, toolkit, values)


def frontend_of(toolkit: Toolkit, *, folder: Path) -> Toolkit:
    """Return the toolkit whose features a model takes; it depends on the model's folder."""
    if toolkit == "3dspeaker" or folder.name in CONVERTED:
        return "3dspeaker"
    # In WeSpeaker's own cache, the folders of these copies have short names.
    usual_home = Path.home() / ".wespeaker"
    home = Path(os.environ.get("WESPEAKER_HOME") or usual_home)
    parent = folder.absolute().parent
    is_in_cache = parent == home.absolute()
    if is_in_cache and folder.name in ("campplus", "eres2net"):
        return "3dspeaker"
    return "wespeaker"


def read_speakers(path: Path, *, num_rows: int) -> list[str] | None:
    """Return the speakers of a head's rows, also of other speeds; None if their number differs.

    A 3D-Speaker list is CSV with a column `spk`, speakers in order of appearance; a WeSpeaker list
    has lines `utterance speaker`, speakers sorted.
    """
    with open_text(path) as lines:
        if path.suffix == ".csv":
            rows = csv.DictReader(lines, skipinitialspace=True)
            speakers_of_rows = [row["spk"] for row in rows if row.get("spk")]
            # A dictionary keeps the order of appearance, which is the order of the head's rows.
            speakers = list(dict.fromkeys(speakers_of_rows))
        else:
            different_speakers: set[str] = set()
            for line in lines:
                fields = line.split()
                if len(fields) > 1:
                    different_speakers.add(fields[1])
            speakers = sorted(different_speakers)

    # With speed perturbation, each speaker has a row for every speed.
    speeds = (1.0,)
    if num_rows == len(speakers) * len(SPEEDS):
        speeds = SPEEDS

    # Imports torch, which `import --help` does not need.
    from speakerlab.losses.head import class_names

    names = class_names(speakers, speeds)
    # A list of other speakers would name every row wrongly.
    if len(names) != num_rows:
        return None
    return names
