"""Entry points: argparse -> configuration -> named objects -> one call."""
