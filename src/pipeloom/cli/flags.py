"""Translation of the library's error messages for the command line: names of arguments become flags."""

from __future__ import annotations

from pipeloom.errors import ArgumentError, PipeloomError

COSTS = {
    **{
        name: f"--{name.replace('_', '-')}"
        for name in ("forward", "input_grad", "weight_grad", "p2p", "all_to_all", "pair")
    },
    "held": "--held-until-weight-grad",
    "microbatch": "--microbatch-costs",
}
_FLAG_OF_ARGUMENT = COSTS | {name: f"--{name.replace('_', '-')}" for name in ("memory", "time_limit", "prove", "pairs")}
_PHRASES = {
    "costs.microbatch": COSTS["microbatch"],
    "overlap_p2p=False": "--no-overlap-p2p",
    "write it as JSON": "write it as JSON (--json)",
}


def words(error: PipeloomError) -> str:
    """Return the error's message with flags in place of argument names."""
    text = str(error)
    if isinstance(error, ArgumentError):
        text = f"{_FLAG_OF_ARGUMENT.get(error.argument, error.argument)}{error.words}"
    for phrase, flag in _PHRASES.items():
        text = text.replace(phrase, flag)
    return text
