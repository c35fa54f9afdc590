"""Drop-ins for ``transformers``: the attention of VITS and of T5 replaced in one call, outputs unchanged.

Nothing here imports transformers: the modules to replace are known by name, and their parameters stay theirs.
"""

from relskew_core._array.extras import needs_extra as _needs_extra

try:
    from relskew_core.huggingface._replace import replace_attention
except ModuleNotFoundError as error:
    raise _needs_extra("relskew_core.huggingface", "torch", error) from error

__all__ = ["replace_attention"]
