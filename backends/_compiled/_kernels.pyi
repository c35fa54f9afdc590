"""The functions of `source/module.cpp` for Python, which lists their arguments."""

from typing import Any

LEVELS: list[str]
PROCESSOR: str
XLA_ATTEND: object
XLA_PULL_BACK: object

def attend(*numbers_arrays_and_parts: Any) -> Any: ...
def pull_back(*numbers_arrays_and_parts: Any) -> Any: ...
def use(level: str, /) -> None: ...
