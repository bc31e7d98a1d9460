"""Check what the stages of run.sh need before the first one starts, and print shell assignments.

Checks GPUs, the configuration of each training, the model of --init, and the noise and rooms that
the trainings use. Prints `device`, a text, and `used`, which of noise and rirs a training uses. An
error is one line on stderr, with exit code 1.
"""

import argparse
import os
import shlex
import signal
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from speakerlab.bin.command import plain_text
from speakerlab.checkpoints.model_files import find_model
from speakerlab.config.build import check_margin
from speakerlab.config.schema import Config, load_config
from speakerlab.experiments.corpus import PROBABILITIES, find_material
from speakerlab.training.devices import VARIABLE, check_format, count_gpus, describe_gpus

ARCHIVES = {"noise": "musan (11 GB)", "rirs": "RIRS_NOISES (1.3 GB)"}  # of openslr.org/17 and /28


def parse(words: Sequence[str]) -> argparse.Namespace:
    """Read the options that stages.sh gives."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--config", type=Path, nargs="+", action="append", required=True)
    parser.add_argument("--set", nargs="*", default=[])
    parser.add_argument("--init", type=Path)
    parser.add_argument("--stage", type=int, required=True)
    parser.add_argument("--nproc", type=int, required=True)
    parser.add_argument(
        "--given", nargs="*", default=[], help="noise and rirs if the user gave them"
    )
    parser.add_argument("--missing", nargs="*", default=[], help="noise and rirs without a folder")
    parser.add_argument("--searched", nargs="*", default=[], help="folders without them")
    return parser.parse_args(words)


def describe_device(configs: Sequence[Config], num_ranks: int) -> str:
    """Return the device as text; raise ValueError if GPUs that are asked for do not exist."""
    for config in configs:
        check_format(config.runtime.device, config.runtime.precision)
    devices = {config.runtime.device for config in configs}
    count = max(count_gpus(device, num_ranks=num_ranks) for device in devices)
    ranks = f"{num_ranks} rank{'s' if num_ranks > 1 else ''}"
    if not count:
        as_asked = os.environ.get(VARIABLE) == "-1" or devices == {"cpu"}
        return f"CPU, {ranks} ({'as requested' if as_asked else describe_gpus()})"
    numbers = " ".join(map(str, range(count)))
    are_all_used = num_ranks == count or VARIABLE in os.environ
    return f"GPU, {ranks}, {describe_gpus()}" + ("" if are_all_used else f'; --gpus "{numbers}"')


def check_sources(
    probabilities: Mapping[str, float],
    *,
    given: Collection[str],
    missing: Collection[str],
    searched: Sequence[str],
) -> None:
    """Raise ValueError unless noise and rooms are given where, and only where, they are used."""
    unused = [place for place in given if not probabilities[place]]
    if unused:
        options, keys = " ".join(f"--{p}" for p in unused), _keys(probabilities, unused)
        raise ValueError(f"{options}: given, but not used by the training ({keys}); leave it out")
    absent = [place for place in missing if probabilities[place]]
    if absent:
        options, keys = " ".join(f"--{p}" for p in absent), _keys(probabilities, absent)
        names = ", ".join(ARCHIVES[place].split()[0] for place in absent)
        where = f" (no {names} in {' or '.join(searched)})" if searched else ""
        folders = " ".join(f"--{place} FOLDER/{ARCHIVES[place]}" for place in absent)
        raise ValueError(
            f"{options}: missing{where}, but used by the training ({keys}); give folders of "
            f"recordings, or download archives in stage 0: {folders}, or train without: "
            + " ".join(f"--{place} none" for place in absent)
        )


def _keys(probabilities: Mapping[str, float], places: Collection[str]) -> str:
    return ", ".join(f"augment.{PROBABILITIES[p]} {probabilities[p]:g}" for p in places)


def main(words: Sequence[str]) -> int:
    """Print the assignments and return the exit code."""
    args = parse(words)
    try:
        configs = [load_config(layers, args.set) for layers in args.config]
        for config in configs:
            check_margin(config)
        device = describe_device(configs, args.nproc)
        if args.init is not None and args.stage <= 3:
            find_model(args.init)
        probabilities = {
            place: max(getattr(config.augment, key) for config in configs)
            for place, key in PROBABILITIES.items()
        }
        if args.stage <= 1:
            check_sources(
                probabilities, given=args.given, missing=args.missing, searched=args.searched
            )
        for config in configs if args.stage in (2, 3, 4) else ():
            for place in PROBABILITIES:
                find_material(config, place)
    except (ValueError, OSError) as error:
        print(plain_text(error), file=sys.stderr)
        return 1
    used = " ".join(place for place, value in probabilities.items() if value)
    print(f"device={shlex.quote(device)} used=({used})")
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # run.sh was killed: there is nobody to tell
    sys.exit(main(sys.argv[1:]))
