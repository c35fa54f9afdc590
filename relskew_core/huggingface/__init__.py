"""Drop-ins for ``transformers``: the attention of twenty families replaced in one call, outputs unchanged.

``replace_attention`` does not import transformers: the modules to replace are identified by their names, and keep their
parameters. ``register_attention`` gives a bias by position to models that use transformers' attention interface, and
``replace_rotary`` gives it instead of rotary positions.
"""

from relskew_core._array.extras import needs_extra as _needs_extra

try:
    from relskew_core.huggingface._register import register_attention, replace_rotary
    from relskew_core.huggingface._replace import replace_attention
except ModuleNotFoundError as error:
    raise _needs_extra("relskew_core.huggingface", "torch", error) from error

__all__ = ["register_attention", "replace_attention", "replace_rotary"]
