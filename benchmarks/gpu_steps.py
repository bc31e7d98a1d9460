"""The rows of gpu.py, part by part: which cases give them, with which options."""

import argparse
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import NamedTuple

import extract
import models_cases
from sides import say

from egs.mini.making import has_espeak
from speakerlab.data.workers import auto_workers

MODELS = ("campplus", "eres2net")
WORKS = ("infer", "train")
KERNELS = {  # settings compared with the default -> precision
    "runtime.tf32=off": "fp32",
    "runtime.channels_last=false": "bf16",
    "runtime.compile=true": "bf16",
    "runtime.compile=reduce-overhead": "bf16",
}
TINY_AUDIO = ("--utterance-seconds=2", "--crop-seconds=1")
# Case -> options of a measurement, of a dry run.
OPTIONS: dict[str, tuple[Sequence[str], Sequence[str]]] = {
    "models": (["--seconds=2"], ["--seconds=0.1", "--micro-batch=2", "--frames=40"]),
    "data": (["--seconds=4"], ["--seconds=0.1", "--micro-batch=4", *TINY_AUDIO]),
    "frontend": (["--seconds=4"], ["--seconds=0.1", "--micro-batch=4"]),
    "end_to_end": (
        ["--seconds=10", "--micro-batch=64", f"--workers={auto_workers(1)}"],
        ["--seconds=0.1", "--micro-batch=2", *TINY_AUDIO],
    ),
    "extract": (
        ["--seconds=5"],
        ["--seconds=0.1", "--utterances=4", "--utterance-seconds=2"],
    ),
    "learning": (["--seeds=1", "--minutes=4"], ["--seeds=1", "--minutes=30"]),
}


class Step(NamedTuple):
    """A call of a case: the rows it gives, in order, and its options besides OPTIONS."""

    case: str
    rows: Sequence[str]
    arguments: Sequence[str] = ()


def check_steps(_options: argparse.Namespace) -> Iterator[Step]:
    yield Step("checks", ["check.doctor"])
    if importlib.util.find_spec("pytest") is None:
        say("part 1: no tests, because pytest is not installed")
        return
    yield Step("checks", ["check.gpu", "check.harm"])


def wait_steps(options: argparse.Namespace) -> Iterator[Step]:
    """Yield trainings from files with the sizes of models, of recipes, in one piece."""
    batch = f"training.global_batch={8 if options.quick else 256}"
    whole = batch.replace("training.global", "runtime.micro")
    settings = [], [batch], [batch, whole]  # the first and last run every line
    yield from map(end_to_end, settings[::2] if options.quick else settings)


def end_to_end(settings: Sequence[str]) -> Step:
    rows: list[str] = []
    for model in MODELS:
        name = ".".join(["end_to_end", model, *settings])
        rows += [name, f"{name}.data_wait"]
    arguments = ["--precision=bf16"]
    if settings:
        arguments += ["--set", *settings]
    return Step("end_to_end", rows, arguments)


def model_steps(options: argparse.Namespace) -> Iterator[Step]:
    """Yield each precision, extraction, then other kernels: compiling takes longest."""
    formats = [*models_cases.PRECISIONS, *(["fp16"] if options.on_gpu else [])]
    arguments = ["--models", *MODELS, "--precisions", *formats]
    each = product(MODELS, WORKS, formats)  # in the order of models.py
    rows = [f"{work}.{model}.{precision}" for model, work, precision in each]
    yield Step("models", rows, arguments)
    formats = extract.ALLOWED
    rows = [f"extract.{model}.{name}" for model, name in product(MODELS, formats)]
    yield Step("extract", rows)
    yield Step("frontend", ["frontend.fbank"])
    for setting, precision in KERNELS.items():
        arguments = ["--models", *MODELS, "--precisions", precision, "--set", setting]
        rows = [f"train.{model}.{precision}.{setting}" for model in MODELS]
        yield Step("models", rows, [*arguments, "--work", "train"])


def learning_steps(options: argparse.Namespace) -> Iterator[Step]:
    """Yield trainings on the mini corpus and on recorded speech, where they are there."""
    arguments = [f"--work={options.work}"]
    fast = (
        ["training.num_epochs=1", "training.epoch_hours=0.1"] if options.quick else []
    )
    arguments += ["--set", *fast] if fast else []
    row = ".".join(["learning.mini.campplus_tiny", *fast])
    if has_espeak():
        yield Step("learning", [row], arguments)
    else:
        remedy = "to install it, bash egs/mini/run.sh --stop-stage 0"
        say(f"part 4: no EER on the mini corpus, which espeak-ng speaks; {remedy}")
    if options.corpus is None:
        say("part 4: no EER on recorded speech; for it, give --corpus")
        return
    lists = sorted(path.name for path in options.corpus.glob("test-*") if path.is_dir())
    name = f"learning.{options.corpus.absolute().name}"
    names = [name] if not lists[1:] else [f"{name}.{list_name}" for list_name in lists]
    rows = [".".join([name, "campplus_tiny", *fast]) for name in names]
    yield Step("learning", rows, [f"--corpus={options.corpus}", *arguments])


def data_steps(_options: argparse.Namespace) -> Iterator[Step]:
    yield Step("data", ["data.to_device", "data.full_cpu"], ["--source=shard"])


# In the order of their worth, if time or the machine ends.
PARTS: dict[int, Callable[[argparse.Namespace], Iterator[Step]]] = {
    1: check_steps,
    2: wait_steps,
    3: model_steps,
    4: learning_steps,
    5: data_steps,
}
