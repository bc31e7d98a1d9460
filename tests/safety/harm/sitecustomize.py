"""Python runs this file at its start: it harms trainings as $CHAOS_HARM says, also below run.sh."""

import os
import sys
from importlib.util import find_spec

TRAINING = "speakerlab.experiments.train"


class Harm:
    """Finds the module of trainings as any finder would, and harms it once it is imported."""

    def find_spec(self, name: str, *_):
        if name != TRAINING:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(name)
        load = spec.loader.exec_module

        def load_and_harm(module) -> None:
            load(module)
            sys.path.append(os.environ["CHAOS_TESTS"])
            from harmed_training import install

            install(*os.environ["CHAOS_HARM"].split())

        spec.loader.exec_module = load_and_harm
        return spec


# A smaller micro-batch, after running out of memory, fits.
if os.environ.get("CHAOS_HARM") and "--below-micro-batch" not in sys.orig_argv:
    sys.meta_path.insert(0, Harm())
