"""Parse the options of run.sh and print them as shell assignments, which stages.sh evaluates.

Usage: options.py RECIPE_DIR [options of run.sh]. Runs before the environment is found, so it needs
nothing but Python 3.10. An error is one line on stderr, with exit code 1.
"""

import argparse
import difflib
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parents[2]
STAGES = """\
Stages: 0 get the corpus, 1 prepare and check data directories, 2 decode and pack all audio,
        3 train, 4 large-margin fine-tuning, 5 extract embeddings, 6 score and report"""
PATHS = ("corpus", "noise", "rirs", "init", "data", "exp", "hardware", "plugins")
METHODS = sorted(path.stem for path in ROOT.glob("conf/ssl/*.yaml"))
# Value of default_noise in recipe.sh -> defaults of --noise and --rirs.
DEFAULT_NOISE = {
    "download": ("musan in or beside the corpus", "RIRS_NOISES in or beside the corpus"),
    "corpus": ("part of the corpus", "part of the corpus"),
    "none": ("none", "none"),
}


def matching(pattern: str, description: str) -> Callable[[str], str]:
    """Return a function that checks that a value matches a pattern."""

    def check_value(value: str) -> str:
        if not re.fullmatch(pattern, value, flags=re.DOTALL):
            raise argparse.ArgumentTypeError(f"must be {description}, not '{value}'")
        return value

    return check_value


def whole(smallest: int, largest: int) -> Callable[[str], int]:
    """Return a function that reads a whole number of a range."""

    def read_value(value: str) -> int:
        if re.fullmatch("0|[1-9][0-9]{0,9}", value) and smallest <= int(value) <= largest:
            return int(value)
        description = f"must be a whole number from {smallest} to {largest}"
        raise argparse.ArgumentTypeError(f"{description}, not '{value}'")

    return read_value


word = matching(".+", "a value")
job = matching("[1-9][0-9]*/[1-9][0-9]*", "I/N with I from 1 to N")
address = matching(".+:[0-9]+", "HOST:PORT of node rank 0")

# Group -> options: name, name of the value, type or choices, default, help.
OPTIONS = {
    "Stages to run": [
        ("stage", "N", whole(0, 6), 0, "first stage"),
        ("stop-stage", "N", whole(0, 6), 6, "last stage"),
        ("dry-run", None, None, False, "print all commands without running them"),
    ],
    "Training": [
        ("model", "NAME", word, "campplus", "configuration, one of conf/*.yaml"),
        ("seed", "N", whole(0, 2**32 - 1), 0, "random seed of weights, data order, augmentation"),
        ("init", "MODEL", word, None, "start from this experiment, model folder or hub:NAME"),
        ("large-margin", "true|false", ["true", "false"], None, "also run stage 4 (default:"
         " false)"),
        ("set", "section.key=value", word, [], "set configuration values; they override all files"),
        ("features", "wave|fbank", ["wave", "fbank"], "wave", "what stage 2 packs and training"
         " reads: audio, or log mel features, which are faster but rule out audio augmentation"),
        ("task", "sv|ssl|lid|diar", ["sv", "ssl", "lid", "diar"], "sv", "speaker verification, the"
         " same trained without labels, or language identification or diarization in recipes with a"
         " folder of that name"),
        ("method", "|".join(METHODS), METHODS, "dino", "with --task ssl, one of conf/ssl/*.yaml"),
    ],
    "Paths": [
        ("corpus", "DIR", word, None, "folder of the corpus, if it is already on disk"),
        ("noise", "DIR|none", word, None, "folder of noise recordings for augmentation (default:"
         " {noise})"),
        ("rirs", "DIR|none", word, None, "folder of room impulse responses for augmentation"
         " (default: {rirs})"),
        ("data", "DIR", word, None, "folder of the data directories (default: {folder}/data, or"
         " data_<task> with --task lid and diar)"),
        ("plugins", "DIR", word, None, "folder of modules of parts that --set names module:Class"),
        ("codec", "pcm|flac", ["pcm", "flac"], "pcm", "format of the audio that stage 2 packs; flac"
         " takes two thirds of the disk space"),
        ("exp", "DIR", word, None, "folder of the experiment (default:"
         " {folder}/exp/<model>_s<seed>); stage 4 writes <DIR>-lm"),
    ],
    "Hardware": [
        ("hardware", "auto|NAME|FILE", word, "auto", "one of conf/hardware/*.yaml, a file like"
         " them, or automatic"),
        ("gpus", '"0 1 2 3"', str, None, 'GPUs of this host to use, one rank on each; "" for the'
         " CPU (default: the first GPU, or the CPU if there is none)"),
        ("nproc", "N", whole(1, 1024), None, "ranks on this host (default: one per GPU, or 1)"),
        ("job", "I/N", job, None, "run only part I of N of stage 2 or 5; the jobs may run on any"
         " hosts that see --data and --exp"),
        ("nnodes", "N", whole(1, 4096), 1, "number of hosts; run the same command on each, with its"
         " own --node-rank"),
        ("node-rank", "I", whole(0, 4095), None, "number of this host, from 0"),
        ("rdzv", "HOST:PORT", address, None, "address of node rank 0; export GLOO_SOCKET_IFNAME if"
         " the hosts have several networks"),
        ("wait-minutes", "M", whole(0, 100000), 10, "minutes after which stage 5 on node rank"
         " 0 fails if the other hosts finish nothing"),
    ],
}  # fmt: skip


class Parser(argparse.ArgumentParser):
    """Parser that raises its errors, and prints its help as a shell command."""

    def print_help(self, file: object = None) -> None:
        """Print the command that shows the help and ends the shell."""
        print_shell(f"printf '%s' {shlex.quote(self.format_help())}; exit 0")

    def error(self, message: str) -> NoReturn:
        """Raise ArgumentError."""
        raise argparse.ArgumentError(None, message)


def build_parser(recipe: str, defaults: dict[str, str]) -> Parser:
    """Return the parser of all options of run.sh; `defaults` are those of the recipe."""
    parser = Parser(
        usage=f"bash egs/{recipe}/run.sh [options]",
        description=STAGES,
        formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(prog, 2, 31, 100),
        allow_abbrev=False,
        exit_on_error=False,
    )
    noise, rirs = DEFAULT_NOISE[defaults.get("default_noise", "download")]
    for title, options in OPTIONS.items():
        group = parser.add_argument_group(title)
        for name, metavar, kind, default, text in options:
            default = defaults.get(name.replace("-", "_"), default)
            text = text.format(folder=f"egs/{recipe}", noise=noise, rirs=rirs)
            if kind is None:
                group.add_argument(f"--{name}", action="store_true", help=text)
                continue
            how: dict[str, Any] = {"choices": kind} if isinstance(kind, list) else {"type": kind}
            if default == []:
                how |= {"nargs": "+", "action": "extend"}
            elif default is not None:
                text += f" (default: {default})"
            group.add_argument(f"--{name}", metavar=metavar, default=default, help=text, **how)
    return parser


def main(words: list[str]) -> int:
    """Print the assignments and return the exit code."""
    recipe_dir = Path(words[0])
    lines = (recipe_dir / "recipe.sh").read_text("utf-8").splitlines()
    variables = [
        split[0].split("=", 1) for line in lines if (split := shlex.split(line, comments=True))
    ]
    parser = build_parser(recipe_dir.name, dict(variables))
    try:
        args, rest = parser.parse_known_args(words[1:])
        if rest:
            options, name = list(parser._option_string_actions), rest[0].split("=")[0]
            check_known("run.sh: unknown option", name, options, hint="see --help")
        args.sample_rate, args.settings = 16000, args.__dict__.pop("set")
        check_settings(args)
        check_stages(args)
        check_job(args)
        check_ranks(args)
        check_task(args, words[1:])
        check_names(args, recipe_dir)
    except argparse.ArgumentError as error:
        print(f"{error.argument_name or 'run.sh'}: {error.message}; see --help", file=sys.stderr)
        return 1
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    for name in PATHS:  # absolute, because a recorded path must mean the same from any folder
        path = getattr(args, name)
        if path and path not in ("none", "auto") and not path.startswith(("/", "hub:")):
            path = f"{os.environ.get('PWD') or Path.cwd()}/{path}"
            setattr(args, name, path)
        if path and re.search("[\x00-\x1f\x7f\ud800-\udfff]", path):
            print(f"--{name}: {path!r} must be one line of UTF-8; rename it", file=sys.stderr)
            return 1
    print_shell("\n".join(f"{name}={quote(value)}" for name, value in vars(args).items()))
    return 0


def check_known(problem: str, name: str, known: Iterable[str], *, hint: str = "") -> None:
    """Raise ValueError with the most similar known names, else `hint`, unless `name` is known."""
    known = list(known)
    if name not in known:
        lower = {other.lower().lstrip("-"): other for other in known}
        word = name.lower().lstrip("-")
        close = difflib.get_close_matches(word, lower, n=1, cutoff=0.4)
        if word not in lower:
            close = [other for other in lower if other.startswith(word)] or close
        hint = f"did you mean {' or '.join(lower[x] for x in close)}?" if close else hint
        raise ValueError(f"{problem} {name}; {hint or 'known are ' + ', '.join(known)}")


def check_names(args: argparse.Namespace, recipe_dir: Path) -> None:
    """Check that the files exist that --model, --hardware and --task name; `hardware` is a path."""
    models, machines = (
        {p.stem: p for p in sorted(ROOT.glob(f"conf/{x}*.yaml"))} for x in ("", "hardware/")
    )
    check_known("--model: unknown model", args.model, models)
    if args.hardware in machines:
        args.hardware = str(machines[args.hardware])
    elif not Path(args.hardware).is_file():
        check_known("--hardware: no such file or preset", args.hardware, ["auto", *machines])
    script = "prepare.py" if args.task in ("sv", "ssl") else f"{args.task}/prepare.py"
    if not (recipe_dir / script).is_file():
        paths = (path.relative_to(ROOT / "egs") for path in ROOT.glob(f"egs/*/{script}"))
        problem = f"the recipe {recipe_dir.name} has no {script}"
        names = " ".join(sorted(path.parts[0] for path in paths)) or "none"
        raise ValueError(f"--task {args.task}: {problem}; recipes with it: {names}")


def check_settings(args: argparse.Namespace) -> None:
    """Check the values of --set; set `sample_rate`."""
    for setting in args.settings:
        name, _, value = setting.partition("=")
        if not name or not value:
            raise ValueError(f"--set: must be section.key=value, not '{setting}'")
        if name in ("data.dir", "seed"):
            option = name.partition(".")[0]
            raise ValueError(f"--set {setting}: would only change stage 3; use --{option} {value}")
        if name == "frontend.sample_rate":
            args.sample_rate = value


def check_stages(args: argparse.Namespace) -> None:
    """Check the range of stages; set `large_margin`."""
    if args.stop_stage < args.stage:
        raise ValueError(f"--stop-stage: {args.stop_stage} is before --stage {args.stage}")
    asked_for_4 = 4 in (args.stage, args.stop_stage)
    if asked_for_4 and args.large_margin == "false":
        problem = f"stages {args.stage} to {args.stop_stage} include stage 4"
        raise ValueError(f"--large-margin false: {problem}; leave out one of the two")
    args.large_margin = "true" if asked_for_4 else args.large_margin or "false"


def check_job(args: argparse.Namespace) -> None:
    """Check that --job fits the range of stages and the hosts."""
    if args.job is None:
        return
    number, total = map(int, args.job.split("/"))
    if number > total:
        raise ValueError(f"--job: must be I/N with I from 1 to N, not {args.job}")
    if args.stage != args.stop_stage or args.stage not in (2, 5):
        problem = f"needs exactly stage 2 or 5, not {args.stage} to {args.stop_stage}"
        raise ValueError(f"--job {args.job}: {problem}; add --stage 2 --stop-stage 2")
    if args.nnodes > 1:
        problem = f"with --nnodes {args.nnodes} each host is a job"
        raise ValueError(f"--job {args.job}: {problem}; leave out one of the two options")


def check_ranks(args: argparse.Namespace) -> None:
    """Check GPUs, ranks and hosts; set `nproc` and `cuda_devices` (-1: none)."""
    gpus = (args.gpus or "").replace(",", " ").split()
    for gpu in gpus:
        if not re.fullmatch(r"\d+|(GPU|MIG)-\S+", gpu) or gpus.count(gpu) > 1:
            problem = f"must be different numbers of GPUs, not '{args.gpus}'"
            raise ValueError(f'--gpus: {problem}; see nvidia-smi -L, or use "" for the CPU')
    if gpus and args.hardware == "cpu":
        raise ValueError(f"--hardware cpu: uses no GPUs, --gpus has {len(gpus)}; leave out one")
    on_cpu = args.gpus is not None or args.hardware == "cpu"
    args.cuda_devices = ",".join(gpus) or ("-1" if on_cpu else "")
    args.nproc = args.nproc or max(1, len(gpus))
    if gpus and args.nproc > len(gpus):
        problem = f"{args.nproc} ranks for {len(gpus)} GPUs"
        raise ValueError(f"--nproc: {problem}; use {len(gpus)} or fewer")
    if args.nnodes == 1 and (args.node_rank is not None or args.rdzv):
        raise ValueError("--node-rank, --rdzv: only for several hosts; add --nnodes N")
    if args.nnodes > 1 and args.node_rank not in range(args.nnodes):
        given = "missing" if args.node_rank is None else args.node_rank
        raise ValueError(f"--node-rank: {given}; give a whole number from 0 to {args.nnodes - 1}")
    if args.nnodes > 1 and not args.rdzv:
        raise ValueError("--rdzv: missing; give HOST:PORT of node rank 0")


def check_task(args: argparse.Namespace, words: list[str]) -> None:
    """Check that --task uses the options that are given."""
    option = "--job" if args.job else "--nnodes" if args.nnodes > 1 else None
    if args.task == "diar" and option:
        problem = "not with --task diar, which one host runs"
        raise ValueError(f"{option}: {problem}; leave it out, and train without --task before")
    if args.task == "diar" and args.init and args.large_margin == "true":
        problem = f"--task diar trains no model with --init {args.init}, which diarizes"
        raise ValueError(f"--large-margin, --stage 4: {problem}; leave it out")
    if args.task == "ssl" and args.large_margin == "true":
        problem = "--task ssl has no labels to fine-tune with"
        raise ValueError(f"--large-margin, --stage 4: {problem}; leave it out")
    if args.task != "ssl" and any(word.split("=")[0] == "--method" for word in words):
        raise ValueError(f"--method {args.method}: only with --task ssl; add it, or leave it out")


def quote(value: object) -> str:
    """Return a value as a word, or as an array, of the shell."""
    if isinstance(value, list):
        return f"({shlex.join(value)})"
    if value is None or isinstance(value, bool):
        return {None: "''", True: "true", False: "false"}[value]
    return shlex.quote(str(value))


def print_shell(code: str) -> None:
    """Print shell code; file names keep their bytes in any locale."""
    sys.stdout.buffer.write(os.fsencode(code + "\n"))
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
