"""One of several ranks that profile a training; started by test_profile.py.

In: a folder, the words of a configuration. Out: `lines.txt` of the first rank there, the traces.
"""

import sys
from pathlib import Path

from speakerlab.bench.profile import profile_training
from speakerlab.config.schema import load_config
from speakerlab.core.process import leave

folder = Path(sys.argv[1])
config = load_config([], sys.argv[2:])
found = profile_training(config, exp_dir=None, num_steps=2, trace=folder / "trace.json")
with (folder / "lines.txt").open("a") as file:  # of the first rank alone, by itself
    file.writelines(f"{line}\n" for line in found.lines)
leave(0)
