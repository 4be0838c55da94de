"""Writes a configuration back as TOML."""

from __future__ import annotations

import json
from typing import Any

from pipeloom.config.sections import Config


def to_toml(config: Config) -> str:
    """Every key of `config` as TOML that `load` reads to an equal one; keys without a value are left out."""
    lines: list[str] = []
    for section, table in config.model_dump(exclude_none=True).items():
        lines.append(f"[{section}]")
        lines += [f"{key} = {_value(value)}" for key, value in table.items()]
        lines.append("")
    return "\n".join(lines)


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, dict):
        inside = ", ".join(f"{json.dumps(str(key))} = {_value(item)}" for key, item in value.items())
        return f"{{{inside}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_value, value))}]"
    return repr(value)
