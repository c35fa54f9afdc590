"""Drop-ins for ``transformers``: the attention of VITS and of T5 replaced in one call, outputs unchanged.

Nothing here imports transformers: the modules to replace are known by name, and their parameters stay theirs.
"""

from relskew_core.huggingface._replace import replace_attention

__all__ = ["replace_attention"]
