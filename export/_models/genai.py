"""The configuration file with which onnxruntime-genai runs a decoder's graph."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import onnx

from relskew_core._array.checks import describe

NAME = "genai_config.json"
UNLIMITED = 2**20  # the ``context_length`` of models whose tables have no end


def check_config(folder: Path, genai: Any, overwrite: bool) -> None:
    if genai is not True and not isinstance(genai, Mapping):
        raise TypeError(f"`genai` must be False or a mapping of entries for {NAME}, got {describe(genai)}")
    ends = None if genai is True else genai.get("eos_token_id")
    ends = ends if isinstance(ends, list) else [ends]
    if not ends or not all(type(token) is int and token >= 0 for token in ends):
        raise ValueError(
            "`genai` must have the token that ends a text, such as genai={'eos_token_id': 2}, or a list of them: "
            f"onnxruntime-genai stops at token 0 unless another one is named, got {describe(genai)}"
        )
    if os.path.lexists(folder / NAME) and not overwrite:
        raise FileExistsError(f"`path` has a {NAME} next to it, pass overwrite=True to replace it: {str(folder)!r}")


def config_text(filename: str, model: onnx.ModelProto, entries: Mapping[str, Any], reach: int | None) -> str:
    shapes = {value.name: value.type.tensor_type.shape.dim for value in (*model.graph.input, *model.graph.output)}
    caches = [shape for name, shape in shapes.items() if name.startswith("past_key_values.")]
    sizes = {(shape[1].dim_value, shape[3].dim_value) for shape in caches}
    if len(sizes) != 1:
        raise ValueError(
            f"`genai` requires caches of one number of heads and one width in all layers, got {sorted(sizes)}"
        )
    heads, width = sizes.pop()
    context, vocabulary = reach or UNLIMITED, shapes["logits"][2].dim_value
    ends = entries["eos_token_id"]
    if not all(token < vocabulary for token in (ends if isinstance(ends, list) else [ends])):
        raise ValueError(f"`genai` must have an `eos_token_id` below {vocabulary}, the model's vocabulary, got {ends}")
    decoder = {
        "filename": filename, "session_options": {}, "head_size": width, "hidden_size": heads * width,
        "num_attention_heads": heads, "num_key_value_heads": heads, "num_hidden_layers": len(caches) // 2,
        "inputs": {"input_ids": "input_ids"} | _names("past", "past_key_values"),
        "outputs": {"logits": "logits"} | _names("present", "present"),
    }  # fmt: skip
    own = {"type": "llama", "vocab_size": vocabulary, "context_length": context, "bos_token_id": 0, "pad_token_id": 0}
    own |= {**entries, "decoder": decoder}
    search = {"do_sample": False, "max_length": own["context_length"], "past_present_share_buffer": False}
    return json.dumps({"model": own, "search": search}, indent=2) + "\n"


def _names(kind: str, prefix: str) -> dict[str, str]:
    return {f"{kind}_{name}_names": f"{prefix}.%d.{name}" for name in ("key", "value")}
