"""Start the service: SERVE_MODEL=EXP python -m examples.service"""

import argparse
import signal
import sys
from collections.abc import Sequence

USAGE_ERROR = 2
HELP = """\
Settings are variables, SERVE_ and the name in capitals, or lines in a YAML file that SERVE_CONFIG
names. SERVE_MODEL is needed: an experiment, a model folder, an .onnx file or hub:NAME. Others, with
all defaults, are in docs/serving.md: SERVE_FOLDER, SERVE_HOST, SERVE_PORT, SERVE_WORKERS ...
"""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m examples.service",
        description="HTTP service for speaker verification.",
        epilog=HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.parse_args(arguments)
    # At any time, also while a model is loaded.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    try:
        from examples.service.server import start

        return start()
    except KeyboardInterrupt:
        return 0
    except ModuleNotFoundError as error:
        problem = (
            f"{error.name}: is not installed; pip install '.[serve]' in Python 3.11"
        )
    except (ValueError, OSError) as error:
        problem = str(error)
    sys.stderr.write(f"{problem}\n")
    return USAGE_ERROR


if __name__ == "__main__":
    sys.exit(main())
