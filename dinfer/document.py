"""A JSON document with its arrays beside it, as plans and predictors are kept: how both are read and refused."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from dinfer.errors import InputError


def read_document(file: Path, name: str, kind: str, version: int) -> dict[str, Any]:
    """The document in ``file``, called ``name`` in errors.

    Raises InputError unless it is JSON that says format ``dinfer-KIND`` and a version from 1 to ``version``.
    """
    try:
        document = json.loads(file.read_text())
    except ValueError as error:
        raise InputError(f"{name} is not JSON ({error})") from None
    if not isinstance(document, dict) or document.get("format") != f"dinfer-{kind}":
        raise InputError(f"{file} does not say format 'dinfer-{kind}'; it is not a {kind} of dinfer")
    found = document.get("version")
    if not isinstance(found, int) or not 1 <= found <= version:
        raise InputError(f"{name} has version {found}, this dinfer reads up to {version}; upgrade dinfer")
    return document


def read_arrays(file: Path, kind: str, rule: str) -> dict[str, np.ndarray]:
    """The arrays by name in the safetensors ``file``; raises InputError, with ``rule`` where it does not exist."""
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    if not file.is_file():
        raise InputError(f"{kind} arrays {file} do not exist; {rule}")
    try:
        return load_file(file)
    except SafetensorError as error:
        raise InputError(f"{kind} arrays {file} cannot be read ({error})") from None
