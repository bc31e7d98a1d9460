"""Configurations of 3D-Speaker and WeSpeaker.

In: a config.yaml, read as plain data. Out: the toolkit, the front end and the head. Needs no torch,
so that `speakerlab import --help` is quick.
"""

import csv
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from speakerlab.config.layers import parse_yaml
from speakerlab.core.reading import open_text

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
            return self._whole(num_bins)
        # In WeSpeaker's front end, in 3D-Speaker's fbank_dim, else the input size of the model.
        fbank = self._section("dataset_args", "fbank_args")
        model = self._section("model_args")
        model_dim = model.get("feat_dim", 80)
        usual_dim = self.values.get("fbank_dim", model_dim)
        num_bins = fbank.get("num_mel_bins", usual_dim)
        return self._whole(num_bins)

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
        """Return the arguments of our Fbank; ValueError if the features are no filter bank."""
        data = self._section("dataset_args")
        fbank = self._section("dataset_args", "fbank_args")
        cmvn = self._section("dataset_args", "cmvn_args")
        tfmel = self._section("dataset_args", "tfmel_args")
        # Wrong features give plausible, but bad embeddings. So anything that our Fbank does not
        # compute exactly is refused: variance normalisation, and tfmel with other settings.
        has_our_tfmel = TFMEL.items() <= tfmel.items()
        is_supported = self.kind == "fbank" or has_our_tfmel
        if not is_supported or cmvn.get("norm_var"):
            setting = "norm_var: true" if is_supported else f"frontend: {self.kind}"
            raise ValueError(
                f"{self.path}: {setting} is not a filter bank with mean normalisation; such"
                " models cannot be imported"
            )

        applies_cmvn = bool(data.get("cmvn", True))
        subtracts_mean = bool(cmvn.get("norm_mean", True))
        mean_norm = applies_cmvn and subtracts_mean
        # WeSpeaker's tfmel subtracts the mean itself.
        if self.kind == "tfmel":
            mean_norm = True
        # 3D-Speaker's extractor subtracts the mean only if `mean_nor` is set. If the configuration
        # has no arguments of an extractor, the mean is subtracted.
        if self.toolkit == "3dspeaker":
            extractor = self._section("feature_extractor", "args")
            mean_norm = bool(extractor.get("mean_nor", not extractor))

        # `resample_rate` is the rate that WeSpeaker resamples to, `sample_rate` the rate of
        # 3D-Speaker's files.
        usual_rate = self.values.get("sample_rate", 16000)
        rate = data.get("resample_rate", usual_rate)
        frame_length = fbank.get("frame_length", 25)
        frame_shift = fbank.get("frame_shift", 10)
        if self.kind == "tfmel":
            name = "tfmel"
        return {
            **FRONTENDS[name],
            "sample_rate": self._whole(rate),
            "num_mel_bins": self.feat_dim,
            "frame_length_ms": float(self._whole(frame_length)),
            "frame_shift_ms": float(self._whole(frame_shift)),
            "mean_norm": mean_norm,
        }

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
        our_args: dict[str, Any] = {}
        our_args["scale"] = args.get("scale", 32.0)
        # Only an angular margin has an easy variant.
        if name == "aam_softmax":
            our_args["easy_margin"] = bool(args.get("easy_margin", False))
        return {"name": name, "args": our_args}

    def _section(self, *keys: str) -> Mapping[str, Any]:
        """Return the section at a path of keys, empty if it is missing or no section."""
        section: Any = self.values
        for key in keys:
            section = section.get(key)
            if not isinstance(section, Mapping):
                section = {}
        return section

    def _whole(self, value: object) -> int:
        """Return a size of features; ValueError for anything but a whole number in the range."""
        # Not `isinstance`: True is an instance of int.
        is_whole = type(value) is int
        if not is_whole or not 1 <= value <= MAX_SIZE:
            raise ValueError(
                f"{self.path}: feature size {value!r} is not a whole number from 1 to"
                f" {MAX_SIZE}"
            )
        return value


def read_config(path: Path | None) -> ForeignConfig:
    """Read a config.yaml as plain data; ValueError, one line, for a tag that names code."""
    if path is None:
        return ForeignConfig(None, None, {})
    text = path.read_bytes()
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
    from speakerlab.data.labels import class_names

    names = class_names(speakers, speeds)
    # A list of other speakers would name every row wrongly.
    if len(names) != num_rows:
        return None
    return names
