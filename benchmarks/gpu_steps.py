"""The rows of gpu.py, part by part: which cases give them, with which options."""

import argparse
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import NamedTuple

import extract
import launches
import memory
import models_cases
from sides import say, suffix

from speakerlab.data.workers import auto_workers

MODELS = ("campplus", "eres2net")
WORKS = ("infer", "train")
KERNELS = {  # settings compared with the default -> precision
    "runtime.tf32=off": "fp32",
    "runtime.channels_last=false": "bf16",
    "runtime.cuda_graph=on": "bf16",
    "runtime.compile=true": "bf16",
}
TINY_AUDIO = ("--utterance-seconds=2", "--crop-seconds=1")
# Case -> options of a measurement, of a dry run.
WORDS: dict[str, tuple[Sequence[str], Sequence[str]]] = {
    "roofline": (["--seconds=5"], ["--seconds=0.1"]),
    "models": (["--seconds=2"], ["--seconds=0.1", "--micro-batch=2", "--frames=40"]),
    "data": (["--seconds=4"], ["--seconds=0.1", "--micro-batch=4", *TINY_AUDIO]),
    "frontend": (["--seconds=4"], ["--seconds=0.1", "--micro-batch=4"]),
    "end_to_end": (
        ["--seconds=10", "--micro-batch=64", f"--workers={auto_workers(1)}"],
        ["--seconds=0.1", "--micro-batch=2", *TINY_AUDIO],
    ),
    "memory": ([], TINY_AUDIO),
    "extract": (["--seconds=5"], ["--seconds=0.1", "--utterances=4", "--utterance-seconds=2"]),
    "learning": (["--seeds=1", "--minutes=4"], ["--seeds=1", "--minutes=30"]),
}


class Step(NamedTuple):
    """A call of a case: the rows it gives, in order, and its options besides WORDS."""

    case: str
    rows: Sequence[str]
    words: Sequence[str] = ()
    peers: bool = False


def check_steps(_options: argparse.Namespace) -> Iterator[Step]:
    yield Step("checks", ["check.doctor", "check.gpu"])


def model_steps(options: argparse.Namespace) -> Iterator[Step]:
    """Yield counts, limits, each precision, then other kernels: compiling takes longest."""
    names = product(MODELS, launches.GRAPHS, (*launches.PARTS, "all"))
    words = ["--device=cpu", "--models", *MODELS, "--precisions", "bf16"]
    rows = [f"launches.{model}.bf16{graph}.{part}" for model, graph, part in names]
    yield Step("launches", rows, words)
    parts = ("matmul.fp32", "matmul.bf16", "copy", "decode.wav", "decode.flac")
    yield Step("roofline", [f"machine.{part}" for part in parts])
    formats = [*models_cases.PRECISIONS, *(["fp16"] if options.on_gpu else [])]
    words = ["--models", *MODELS, "--precisions", *formats]
    yield Step("models", [".".join(row) for row in each_model(formats)], words)
    for setting, precision in KERNELS.items():
        words = ["--models", *MODELS, "--precisions", precision, "--set", setting, "--no-share"]
        rows = [f"train.{model}.{precision}.{setting}" for model in MODELS]
        yield Step("models", rows, [*words, "--work", "train"])


def each_model(formats: Sequence[str]) -> Iterator[tuple[str, str, str]]:
    """Yield (work, model, precision) in the order of models.py."""
    for model, work, precision in product(MODELS, WORKS, formats):
        yield work, model, precision


def data_steps(options: argparse.Namespace) -> Iterator[Step]:
    """Yield the data path, then trainings: the peers', the recipes', by graphs, in one piece."""
    yield Step("data", ["data.to_device", "data.full_cpu"], ["--source=shard"])
    yield Step("frontend", ["frontend.fbank"])
    batch = f"training.global_batch={8 if options.quick else 256}"
    whole, graphs = batch.replace("training.global", "runtime.micro"), "runtime.cuda_graph=auto"
    settings = [], [batch], [batch, graphs], [batch, whole]  # the first and last run every line
    yield from map(end_to_end, settings[::3] if options.quick else settings)
    crops = memory.CROPS["cuda" if options.on_gpu else "cpu"]
    yield Step("memory", [f"memory.{m}.bf16.{count}" for m, count in product(MODELS, crops)])


def end_to_end(settings: Sequence[str] = (), *, peers: bool = False) -> Step:
    names = [".".join(["end_to_end", model, *settings]) for model in MODELS]
    rows = [name + end for name in names for end in ("", ".data_wait")]
    words = ["--precision=bf16", *(["--set", *settings] if settings else [])]
    return Step("end_to_end", rows, words, peers)


def use_steps(options: argparse.Namespace) -> Iterator[Step]:
    yield extraction()
    yield Step("checks", ["check.harm"])
    words = [f"--work={options.out / 'learning'}"]
    fast = ["training.num_epochs=1", "training.epoch_hours=0.1"] if options.quick else []
    words += ["--set", *fast] if fast else []
    yield Step("learning", [".".join(["learning.mini.campplus_tiny", *fast])], words)
    if options.corpus is None:
        say("part 4: no EER on recorded speech; for it, give --corpus")
        return
    lists = sorted(path.name for path in options.corpus.glob("test-*") if path.is_dir())
    name = f"learning.{options.corpus.absolute().name}"
    names = [name] if not lists[1:] else [f"{name}.{one}" for one in lists]
    rows = [".".join([name, "campplus_tiny", *fast]) for name in names]
    yield Step("learning", rows, [f"--corpus={options.corpus}", *words])


def extraction(*, peers: bool = False) -> Step:
    rows = [f"extract.{model}.{name}" for model, name in product(MODELS, extract.ALLOWED)]
    return Step("extract", rows, peers=peers)


def peer_steps(options: argparse.Namespace) -> Iterator[Step]:
    """Yield everything that has a peer, the longest last."""
    if not options.checkouts:
        say("part 5: left out; for it, give --peers 3dspeaker=DIR wespeaker=DIR")
        return
    yield Step(
        "frontend", [f"frontend.fbank{suffix(peer)}" for peer in options.checkouts], (), True
    )
    if "3dspeaker" in options.checkouts:
        yield end_to_end(peers=True)
        yield extraction(peers=True)
    formats = models_cases.PRECISIONS
    asked = argparse.Namespace(precisions=formats, work=WORKS, rows=None, set=[])
    for model, (_, cases) in models_cases.CASES.items():
        found = [case for case in cases if case.peer in options.checkouts]
        rows = [row[0] for case in found for row in models_cases.rows_of(model, case, asked)]
        if rows:
            yield Step("models", rows, ["--models", model, "--no-share"], True)


PARTS: dict[int, Callable[[argparse.Namespace], Iterator[Step]]] = {
    1: check_steps,
    2: model_steps,
    3: data_steps,
    4: use_steps,
    5: peer_steps,
}
