"""Commands and options that scripts may use: each that was ever published is still accepted."""

import argparse
import importlib
import re
import subprocess
from pathlib import Path

import pytest

from speakerlab.__main__ import COMMANDS, module_of

ROOT = Path(__file__).parents[2]
# An option, or a positional argument, then: ? takes no value, + one or more, * any number of them;
# ! required; = its choices.
PUBLISHED = {
    "check": "DIR+ --decode? --allow-rejected --force? --sample-rate --num-workers",
    "pack": (
        "DIR+ --codec=pcm|flac --features=wave|fbank --config+ --set* --job --out"
        " --allow-rejected --sample-rate --num-workers"
    ),
    "doctor": "--data --exp --model --config+ --set* --gpus --nproc --num-workers",
    "plan": (
        "--model --config+ --table? --recipe --gpu-mem --gpus "
        "--precision=auto|fp32|bf16|fp16 --speakers --bank-gb --set*"
    ),
    "train": (
        "--exp! --config+! --init --set* --below-micro-batch --gpus --nproc --nnodes "
        "--node-rank --rdzv --max-restarts --check?"
    ),
    "average": "EXP --last --out!",
    "extract": (
        "--exp! --data! --untrained? --per-speaker --nproc --precision=fp32|bf16|auto "
        "--job --wait-minutes"
    ),
    "pseudo-label": (
        "--model! --data! --speakers! --out! --min-utterances --seed --nproc "
        "--precision=fp32|bf16|auto"
    ),
    "clean": (
        "--model! --data! --out! --far --join-speakers? --nproc "
        "--precision=fp32|bf16|auto"
    ),
    "score": (
        "--exp! --trials+! --backend+ --development"
        " --calibration=auto|validation|cross|none --top-n --lda-dim --adapt"
        " --p-target+ --force? --far --threshold --json?"
    ),
    "classify": "--exp! --data+! --force?",
    "fuse": "--trials! --scores+! --out! --dev-trials --dev-scores+ --speakers",
    "compare": "SCORES+ --trials! --far --frr --json?",
    "compare-runs": "EXP+ --against --trials+ --json?",
    "plot": (
        "KIND=det|scores|roc|duration|confusion SYSTEM+ --trials --out! --width --font-size"
        " --p-target+ --intervals? --data"
    ),
    "table": "SYSTEM+ --trials --format=latex|markdown|csv --out --p-target+",
    "choose": (
        "--data! --models+ --out --far --durations+ --codecs+ --snr+ --noise --utterances"
        " --per-speaker --seconds --gpus"
    ),
    "der": (
        "REF HYP MORE* --uem --collar --skip-overlap? --json? --report --data --force?"
    ),
    "embed": (
        "FILE* --list --wav-scp --out! --format=ark|jsonl|npy|safetensors "
        "--runtime=torch|onnx --allow-rejected --window --step --channel --model! --device"
        " --precision=fp32|bf16|auto"
    ),
    "verify": (
        "FILE* --far --threshold --trials --wav-scp --channel --json? --model!"
        " --device --precision=fp32|bf16|auto"
    ),
    "enroll": ("NAME FILE+ --speakers --model! --device --precision=fp32|bf16|auto"),
    "identify": (
        "FILE+ --speakers --far --top --channel --json? --model!"
        " --device --precision=fp32|bf16|auto"
    ),
    "diarize": (
        "FILE* --speakers --min-speakers --max-speakers --vad --method=ahc|spectral|vbx"
        " --threshold --development --overlap --words --out --force? --live? --latency"
        " --sample-rate --model!"
        " --device --precision=fp32|bf16|auto"
    ),
    "link": (
        "DIR+ --model! --out! --far --threshold --speakers --known --allow-same-recording?"
        " --force?"
    ),
    "words": "FILE+ --turns! --out! --max-gap",
    "calibrate": (
        "--model! --data! --for=verification|diarization --far+ --development --out --force?"
    ),
    "import": (
        "FILE? --list? --out! --force? --model-config --frontend=3dspeaker|wespeaker --speakers"
    ),
    "card": "MODEL",
    "publish": "EXP --to! --revision --private? --licence --force?",
    "check-part": "PART --plugins --set*",
    "bench": (
        "WHAT?=all|machine|model|train|data --model+ --config+ --set* --seconds"
        " --listen --json --profile? --steps --trace --exp"
    ),
    "export": (
        "MODEL --out! --format=onnx|3dspeaker|sherpa-onnx|wespeaker --int8? --calibrate --test+ "
        "--force?"
    ),
}
# Options of every run.sh, and those of recipes that train.
ALL_RECIPE_OPTIONS = (
    "--corpus --data --dry-run --exp --gpus --hardware --init --job --max-restarts"
    " --nnodes --node-rank --nproc --plugins --rdzv --set --stage --stop-stage --task"
    " --torch --wait-minutes"
)
TRAINING_OPTIONS = "--model --noise --rirs --seed"
OPTIONS_OF_DATA = "--codec --features"  # where the data are those of the training
# Recipe -> its own options, also of its run_segmentation.sh.
DIARIZING = {
    "aishell4": ["--channel"],
    "alimeeting": ["--channel"],
    "ami": ["--microphone"],
    "voxconverse": [],
}
RECIPE_OPTIONS = (
    f"{ALL_RECIPE_OPTIONS} {TRAINING_OPTIONS} {OPTIONS_OF_DATA} --also --large-margin --method"
    " --teacher --microphone --allow-rejected --folds --voxceleb --channel --embedder --development"
)


def parser_of(name: str, monkeypatch: pytest.MonkeyPatch) -> argparse.ArgumentParser:
    """Return the parser that a command builds, caught when it is about to parse."""
    caught: list[argparse.ArgumentParser] = []

    def catch(self: argparse.ArgumentParser, *_args: object) -> None:
        caught.append(self)
        raise KeyboardInterrupt

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", catch)
    with pytest.raises(KeyboardInterrupt):
        importlib.import_module(module_of(name)).main([])
    return caught[0]


def describe(action: argparse.Action) -> tuple[str, bool, set[str]]:
    """Return how many values an argument takes, whether it is required, and its choices."""
    count = "?" if action.nargs == 0 else str(action.nargs or "")
    required = bool(action.option_strings) and action.required
    return count, required, set(action.choices or ())


@pytest.mark.parametrize("name", PUBLISHED)
def test_every_published_option_is_accepted(name, monkeypatch):
    actions = parser_of(name, monkeypatch)._actions
    options = {
        text: describe(action) for action in actions for text in action.option_strings
    }
    positionals = [describe(action) for action in actions if not action.option_strings]
    required = {
        option for option, (_, is_required, _) in options.items() if is_required
    }
    for word in PUBLISHED[name].split():
        option, count, mark, choices = re.findall(r"([\w-]+)([?+*]?)(!?)=?(\S*)", word)[
            0
        ]
        action = options[option] if option.startswith("--") else positionals.pop(0)
        assert action[0] == count, word
        assert action[1] <= bool(mark), f"{word} was optional"
        assert set(filter(None, choices.split("|"))) <= action[2], word
        required.discard(option)
    assert not positionals and not required, "a published command line would be refused"


def test_every_published_command_exists():
    assert PUBLISHED.keys() <= COMMANDS.keys()


def published_options(script: str) -> set[str]:
    """Return the options that were ever published of egs/`script`."""
    options = ALL_RECIPE_OPTIONS.split()
    recipe = script.partition("/")[0]
    if recipe in DIARIZING:
        options += [*DIARIZING[recipe], "--embedder", "--seed"]
        only_diar = [] if script.endswith("run_segmentation.sh") else ["--development"]
        return {*options, *only_diar}
    options += TRAINING_OPTIONS.split()
    if script == "mini/run_segmentation.sh":
        return {*options, "--embedder"}
    if script == "mini/run.sh":
        options += ["--embedder"]
    if script.endswith("run.sh"):
        options += ["--large-margin", "--method", "--teacher"]
    if script == "voxceleb/run.sh":
        options += ["--also"]
    if script == "voxblink2/run.sh":
        options += ["--voxceleb"]
    if script == "own/run.sh":
        options += ["--allow-rejected", "--folds"]
    if script.endswith("run_diar.sh"):
        return {*options, "--large-margin"}
    if script.endswith("run_pretrained.sh"):
        # Verification over a pretrained model, which hears waves.
        options = [*options, "--pretrained", *OPTIONS_OF_DATA.split()]
        return {*options} - {"--task", "--features"}
    return {*options, *OPTIONS_OF_DATA.split()}


@pytest.mark.parametrize(
    "script",
    sorted(str(path.relative_to(ROOT / "egs")) for path in ROOT.glob("egs/*/run*.sh")),
)
def test_a_recipe_lists_the_options_that_it_has(script):
    command = ["bash", str(ROOT / "egs" / script), "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert set(
        re.findall(r"^  (--[a-z-]+)=", done.stdout, re.MULTILINE)
    ) == published_options(script)
