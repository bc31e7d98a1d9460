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
    "check": "DIR+ --decode? --allow-rejected --sample-rate --num-workers",
    "pack": "DIR+ --codec=pcm|flac --features=wave|fbank --config+ --set* --job --allow-rejected "
    "--sample-rate --num-workers",
    "doctor": "--data --exp --model --config+ --set* --gpus --nproc --num-workers",
    "plan": "--model --config+ --table? --recipe --gpu-mem --gpus "
    "--precision=auto|fp32|bf16|fp16 --speakers --bank-gb --set*",
    "train": "--exp! --config+! --init --set* --below-micro-batch",
    "average": "EXP --last --out!",
    "extract": "--exp! --data! --untrained? --per-speaker --nproc --precision=fp32|bf16|auto "
    "--job --wait-minutes",
    "pseudo-label": "--model! --data! --speakers! --out! --min-utterances --seed --nproc "
    "--precision=fp32|bf16|auto",
    "score": "--exp! --trials+! --backend+ --development --calibration=auto|validation|cross|none "
    "--top-n --lda-dim --adapt --p-target+",
    "classify": "--exp! --data+!",
    "fuse": "--trials! --scores+! --out! --dev-trials --dev-scores+ --speakers",
    "compare": "SCORES+ --trials! --far --frr",
    "der": "REF HYP --uem --collar --skip-overlap? --json --report --data",
    "embed": "FILE* --list --wav-scp --out! --format=ark|jsonl|npy|safetensors "
    "--runtime=torch|onnx --allow-rejected --model! --device=auto|cpu|cuda "
    "--precision=fp32|bf16|auto",
    "verify": "FILE* --far --trials --wav-scp --model! --device=auto|cpu|cuda "
    "--precision=fp32|bf16|auto",
    "enroll": "NAME FILE+ --speakers --model! --device=auto|cpu|cuda --precision=fp32|bf16|auto",
    "identify": "FILE --speakers --far --top --model! --device=auto|cpu|cuda "
    "--precision=fp32|bf16|auto",
    "diarize": "FILE+ --speakers --min-speakers --max-speakers --vad --method=ahc|spectral|vbx "
    "--threshold --development --overlap --out --model! --device=auto|cpu|cuda "
    "--precision=fp32|bf16|auto",
    "calibrate": "--model! --data! --for=verification|diarization --far+ --out --force?",
    "import": "FILE? --list? --out! --model-config --frontend=3dspeaker|wespeaker --speakers",
    "card": "MODEL",
    "check-part": "PART --plugins --set*",
    "bench": "WHAT?=all|machine|model|train|data --model+ --config+ --set* --seconds --listen "
    "--json --profile? --steps --trace --exp",
    "export": "MODEL --out! --format=onnx|3dspeaker|sherpa-onnx --int8? --calibrate --test+ "
    "--force?",
}
RECIPE_OPTIONS = (
    "--codec --corpus --data --dry-run --exp --features --gpus --hardware --init --job "
    "--large-margin --method --model --nnodes --node-rank --noise --nproc --plugins --rdzv --rirs "
    "--seed --set --stage --stop-stage --task --wait-minutes"
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
    options = {text: describe(action) for action in actions for text in action.option_strings}
    positionals = [describe(action) for action in actions if not action.option_strings]
    required = {option for option, (_, is_required, _) in options.items() if is_required}
    for word in PUBLISHED[name].split():
        option, count, mark, choices = re.findall(r"([\w-]+)([?+*]?)(!?)=?(\S*)", word)[0]
        found = options[option] if option.startswith("--") else positionals.pop(0)
        assert found[0] == count, word
        assert found[1] <= bool(mark), f"{word} was optional"
        assert set(filter(None, choices.split("|"))) <= found[2], word
        required.discard(option)
    assert not positionals and not required, "a published command line would be refused"


def test_every_published_command_exists():
    assert PUBLISHED.keys() <= COMMANDS.keys()


@pytest.mark.parametrize("recipe", sorted(path.parent.name for path in ROOT.glob("egs/*/run.sh")))
def test_every_recipe_lists_every_option(recipe):
    command = ["bash", str(ROOT / "egs" / recipe / "run.sh"), "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert set(RECIPE_OPTIONS.split()) <= set(re.findall(r"(?<![\w-])--[a-z-]+", done.stdout))
