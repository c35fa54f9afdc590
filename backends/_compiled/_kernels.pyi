"""What `source/module.cpp` gives to Python; the arguments stand there."""

from typing import Any

LEVELS: list[str]
XLA_ATTEND: object
XLA_PULL_BACK: object

def attend(*numbers_arrays_and_parts: Any) -> Any: ...
def pull_back(*numbers_arrays_and_parts: Any) -> Any: ...
def use(level: str, /) -> None: ...
