"""A row of results with numbers that can be told apart."""

from typing import Any

from speakerlab.experiments.report import result_row


def row(**changes: Any) -> dict[str, Any]:
    """One of cosine scores on a list `mini`, but for the changes."""
    values = {
        "trials": "mini",
        "system": "campplus_tiny",
        "eer": 0.0567,
        "eer_untrained": 0.3785,
        "eer_ci95": (0.0465, 0.0685),
        "min_dcf": {"0.01": 0.5, "0.05": 0.392},
        "num_target": 600,
        "num_nontarget": 5400,
        "backend": "cosine",
        "protocol": "all pairs of 20 unseen voices",
        "model_sha256": "ab" * 32,
        "commit": "1234567",
    }
    return result_row(**{**values, **changes})
