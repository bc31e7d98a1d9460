"""Write a recipe's reference curves from finished runs that differ only in their seed.

python egs/common/reference.py egs/<recipe> EXP...
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from speakerlab.experiments.curves import write_reference


def main() -> None:
    """Write `reference.json` into the recipe's folder."""
    recipe, *exp_dirs = map(Path, sys.argv[1:])
    if not exp_dirs:
        sys.exit("reference.py: no experiments given; use reference.py egs/<recipe> EXP...")
    try:
        write_reference(recipe / "reference.json", exp_dirs)
    except (ValueError, OSError) as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
