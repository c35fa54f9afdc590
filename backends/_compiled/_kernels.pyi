"""What `source/module.cpp` gives to Python; the arguments stand there."""

from typing import Any

LEVELS: list[str]

def attend(numbers: tuple[float, ...], /, *arrays_and_part: Any) -> Any: ...
def use(level: str, /) -> None: ...
