"""What processes print of their own accord."""


def without_notices(printed: str) -> str:
    """Leave out the lines that torch 2.8 prints when the processes have found each other."""
    return "".join(line for line in printed.splitlines(keepends=True) if not line.startswith("[Gloo] "))
