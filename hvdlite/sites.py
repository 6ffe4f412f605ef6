"""Where the script calls an operation: the line that error texts name."""

from __future__ import annotations

import os
import sys
from types import CodeType

import torch

_MOST_TEXTS = 4096


def _folder(file: str | None) -> str:
    return os.path.dirname(os.path.abspath(file or "")) + os.sep


# Of these no frame is the script's; what is installed below the standard library may be.
_LIBRARIES = (_folder(torch.__file__), _folder(__file__))
_STANDARD = _folder(os.__file__)
_INSTALLED = (os.sep + "site-packages" + os.sep, os.sep + "dist-packages" + os.sep)
# Code without a file that no user wrote: of the interpreter, and what torch.compile makes.
_GENERATED = ("<frozen ", "<eval_with_key>", "<torch")

# By file: whether it is the script's, or a framework's that calls torch.
_is_script: dict[str, bool] = {}
# By the code's address and the place in it. The code is kept, so that no other gets its address.
_texts: dict[tuple[int, int], tuple[CodeType, str]] = {}


def _decide(file: str) -> bool:
    path = file if file.startswith("<") or "\0" in file else os.path.abspath(file)
    if path.startswith((*_LIBRARIES, *_GENERATED)):
        is_script = False
    elif path.startswith(_STANDARD):
        is_script = any(folder in path for folder in _INSTALLED)
    else:
        is_script = True
    _is_script[file] = is_script
    return is_script


def site(inner: int = 0) -> str:
    """ "train.py:12": the innermost line of this thread outside of torch, hvdlite and the standard
    library. '' where there is none, as in threads that C++ started.

    inner: so many frames, this function's among them, are hvdlite's and not looked at. Each
        operation calls this; every further frame up to the script's costs a tenth of a microsecond.
    """
    if torch.compiler.is_compiling():  # Dynamo can't look at frames
        return ""
    try:
        frame = sys._getframe(inner)
    except ValueError:  # there are no more frames
        return ""
    while True:
        code = frame.f_code
        file = code.co_filename
        is_script = _is_script.get(file)
        if is_script is None:
            is_script = _decide(file)
        if is_script:
            break
        back = frame.f_back
        if back is None:
            return ""
        frame = back
    key = (id(code), frame.f_lasti)
    known = _texts.get(key)
    if known is not None:
        return known[1]
    # Names of files may hold bytes that are no text.
    name = os.path.basename(file).replace("\0", "?").encode("utf-8", "replace").decode()
    text = f"{name}:{frame.f_lineno}"
    if len(_texts) >= _MOST_TEXTS:
        _texts.clear()
    _texts[key] = (code, text)
    return text
