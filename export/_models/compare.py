"""Comparison of a graph with its model, in onnxruntime."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from torch import Tensor, nn

from relskew_core._array.extras import needs_extra
from relskew_core.export._check.inspect import Check
from relskew_core.export._files.library import custom_ops_library, open_session
from relskew_core.export._models.caches import PAST_LENGTH
from relskew_core.export._models.convert import Flat
from relskew_core.export._models.decoder_calls import ENCODER, FIRST, LATER, OF_MEMORY, GraphPart, source_of
from relskew_core.export._nodes.operator_nodes import SCALE

Arrays = list[np.ndarray[Any, Any]]
Run = Callable[[Sequence[Tensor], str], Arrays]
"""Runs a graph on inputs; errors contain the text, which describes the case."""

_TOO_NEW = re.compile(r"Opset (\d+) is under development.* till opset (\d+)", re.DOTALL)
_UNSERVED = re.compile(r"Could not find an implementation for (\w+)")
TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}
"""The allowed relative L2 errors of many layers, far below the effect of a wrong position."""

OF_INT8 = 5e-2  # the allowed error with caches in int8, whose rows have relative errors of about 1 %


def runner(path: Path, names: Sequence[str], *, operator: bool = False) -> Run:
    session = opened(path, operator=operator)
    taken = {value.name for value in session.get_inputs()}  # inputs on which no output depends are missing

    def run(inputs: Sequence[Tensor], case: str) -> Arrays:
        given = {name: value.numpy() for name, value in zip(names, inputs, strict=True) if name in taken}
        with _naming(case):
            return list(session.run(None, given))

    return run


def after(memory: Path, run: Run, inputs: Sequence[str], *, operator: bool = False) -> Run:
    """Return a function that runs the graph of a memory on the last inputs, ``inputs``, and passes its results on."""
    first = runner(memory, inputs, operator=operator)

    def both(given: Sequence[Tensor], case: str, **options: Any) -> Arrays:
        start = len(given) - len(inputs)
        made = first(given[start:], f"the memory of {case}")
        return run([*given[:start], *map(torch.from_numpy, made)], case, **options)

    return both


def _quantised(array: np.ndarray[Any, Any]) -> Arrays:
    """Return rows as caches in int8 hold them, and the scale of each row."""
    scales = np.abs(array).max(axis=-1, initial=0).astype(np.float32) / np.float32(127)
    rows = np.rint(array / np.where(scales > 0, scales, 1)[..., None])
    return [rows.astype(np.int8), scales]


def runner_in_place(
    path: Path, names: Sequence[str], length: int | None, *, operator: bool = False, in_int8: bool = False
) -> Run:
    """Return a function that runs a decoder with fixed caches as if they grew, in one buffer for past and present."""
    import onnxruntime

    session = opened(path, operator=operator)
    outputs = [value.name for value in session.get_outputs() if not value.name.endswith(SCALE)]

    def run(inputs: Sequence[Tensor], case: str, length: int | None = length) -> Arrays:
        tokens, *others = (value.numpy() for value in inputs)
        pasts, memory = others[: len(outputs) - 1], others[len(outputs) - 1 :]
        filled = pasts[0].shape[2]
        total = filled + tokens.shape[1]
        binding = session.io_binding()
        binding.bind_cpu_input(names[0], np.ascontiguousarray(tokens))
        binding.bind_cpu_input(PAST_LENGTH, np.array([filled], np.int64))
        binding.bind_output(outputs[0])
        buffers: list[Arrays] = []
        for name, array in zip(names[len(outputs) :], memory, strict=True):
            binding.bind_cpu_input(name, array)
        for name, output, past in zip(names[1 : len(outputs)], outputs[1:], pasts, strict=True):
            buffers.append([])
            for part, end in zip(_quantised(past) if in_int8 else [past], ("", SCALE), strict=False):
                # The pages of zeros use no memory until they are written to, however long the cache is.
                buffer = np.zeros((*part.shape[:2], length or total + 5, *part.shape[3:]), part.dtype)
                buffer[:, :, :filled] = part
                buffer[:, :, filled : total + 5] = 7  # entries that no query may see
                held = onnxruntime.OrtValue.ortvalue_from_numpy(buffer)
                binding.bind_ortvalue_input(f"{name}{end}", held)
                binding.bind_ortvalue_output(f"{output}{end}", held)
                buffers[-1].append(buffer[:, :, :total])
        with _naming(case):
            session.run_with_iobinding(binding)
        if in_int8:
            buffers = [[np.multiply(rows, scales[..., None]).astype(past.dtype)] for rows, scales in buffers]
        return [binding.get_outputs()[0].numpy(), *(whole for (whole,) in buffers)]

    return run


def opened(path: Path, *, operator: bool) -> Any:
    try:
        import onnxruntime
    except ModuleNotFoundError as error:
        raise needs_extra("the check of an export", "onnxruntime", error) from error
    library = custom_ops_library() if operator else None
    try:  # some cases are expected to fail: the level keeps onnxruntime from logging them
        return open_session(onnxruntime, path, ["CPUExecutionProvider"], library=library, log_severity_level=4)
    except Exception as error:  # runtimes raise their own exception types
        if (newer := _TOO_NEW.search(str(error))) is not None:
            raise ValueError(
                f"`opset` must be at most {newer[2]} for the check in onnxruntime {onnxruntime.__version__}, got "
                f"{newer[1]}: check=False is for other runtimes"
            ) from error
        missing, weights = _UNSERVED.search(str(error)), _weights(path)
        if missing is None or onnx.TensorProto.BFLOAT16 not in weights:
            raise RuntimeError(
                f"onnxruntime {onnxruntime.__version__} cannot open the exported graph, check=False is for other "
                f"runtimes: {error}"
            ) from error
        advice = "give dtype='float16' or 'float32' to cast it on export, or check=False for a machine that has them"
        if weights[-1] != onnx.TensorProto.BFLOAT16:
            advice = (
                "its weights have another dtype, and dtype= does not change what its code computes in bfloat16: give "
                "check=False to write the graph for a machine that has them"
            )
        raise ValueError(
            f"`model` computes in bfloat16, for which onnxruntime has no {missing[1]} on CPUs: {advice}"
        ) from error


def _weights(path: Path) -> list[int]:
    """Return the types of the floating arrays that a graph stores, the largest last."""
    floating = (onnx.TensorProto.BFLOAT16, onnx.TensorProto.FLOAT16, onnx.TensorProto.FLOAT, onnx.TensorProto.DOUBLE)
    stored = onnx.load(path, load_external_data=False).graph.initializer
    return [x.data_type for x in sorted(stored, key=lambda x: math.prod(x.dims)) if x.data_type in floating]


@contextmanager
def _naming(case: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # runtimes raise their own exception types
        raise RuntimeError(f"the exported graph fails where `model` does not, for {case}: {error}") from error


def results_of(model: nn.Module, inputs: Sequence[Tensor]) -> list[Tensor]:
    with torch.no_grad():
        return [value.detach() for value in model(*(value.clone() for value in inputs))]


def gives_numbers(run: Run, inputs: Sequence[Tensor]) -> bool:
    try:
        return bool(np.isfinite(run(inputs, "inputs that the model refuses")[0]).any())
    except RuntimeError:
        return False


def check_equal(
    names: Sequence[str], given: Arrays, wanted: Sequence[Tensor], case: str, tolerance: float | None,
    checks: list[Check],
) -> None:  # fmt: skip
    """Raise unless a runtime's results are torch's; record the differences in ``checks``."""
    import onnxruntime

    origin = f"onnxruntime {onnxruntime.__version__}", "CPUExecutionProvider", case
    for name, found, expected in zip(names, given, wanted, strict=True):
        right = expected.numpy()
        message = f"the exported graph does not do what `model` does: output {name!r} for {case}"
        if found.shape != right.shape or found.dtype != right.dtype:
            raise RuntimeError(f"{message} is {found.dtype} {found.shape}, of torch {right.dtype} {right.shape}")
        if not expected.is_floating_point():
            if not np.array_equal(found, right):
                raise RuntimeError(f"{message} differs in {np.mean(found != right):.1%} of its numbers")
            checks.append(Check(name, *origin, ok=True, error=0.0, gate=0.0))
            continue
        limit = TOLERANCES[expected.dtype] if tolerance is None else tolerance
        error = _relative_error(found, right)
        if not error <= limit:
            raise RuntimeError(
                f"{message} differs by {error:.1e} relative to its norm, more than {limit:.0e}, the `tolerance`"
            )
        checks.append(Check(name, *origin, ok=True, error=error, gate=limit))


def _relative_error(given: np.ndarray[Any, Any], right: np.ndarray[Any, Any]) -> float:
    known = np.isfinite(right)  # runtimes differ in the softmax of an empty row
    x, y = (np.where(known, array, 0).astype(np.float64) for array in (given, right))
    norm = np.linalg.norm(y)
    return float(np.linalg.norm(x - y) / norm) if norm else float(np.abs(x).max(initial=0))


Draw = Callable[[int], list[Tensor]]  # makes a memory for this many rows, or none
LONGEST = 40
FAR = 300
FULL = 4
LARGEST = 2**29  # the most bytes of caches that are tried


def check_decoder(
    flat: Flat, run: Run, names: Sequence[str], memory: Draw, *, reach: int | None, tolerance: float | None,
    checks: list[Check],
) -> None:  # fmt: skip
    """Raise unless a graph gives torch's logits and caches, its outputs ``names``.

    ``reach`` is where its tables or its caches end.
    """
    tokens, *rest = flat.inputs()
    shown = rest[: len(names) - 1]
    vocabulary = results_of(flat, [tokens, *rest])[0].shape[2]
    generator = torch.Generator("cpu").manual_seed(0)

    def drawn(batch: int, length: int) -> Tensor:
        return torch.randint(vocabulary, (batch, length), generator=generator, dtype=torch.int64, device="cpu")

    def caches(batch: int, length: int) -> list[Tensor]:
        made = []
        for like in shown:
            shape = batch, like.shape[1], length, like.shape[3]
            made.append(torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu").to(like.dtype))
        return [*made, *memory(batch)]

    def same(given: Sequence[Tensor], wanted: Sequence[Tensor], case: str) -> None:
        check_equal(names, run(given, case), wanted, case, tolerance, checks)

    one = [drawn(1, 1), *caches(1, 0)]
    same(one, results_of(flat, one), "one token")
    prompt = [drawn(3, min(LONGEST, reach or LONGEST)), *caches(3, 0)]
    while True:
        try:
            wanted = results_of(flat, prompt)
            break
        except Exception:  # another part of the model may not support this length
            length = prompt[0].shape[1]
            if length < 4:
                raise
            prompt[0] = prompt[0][:, : length // 2]
    length = prompt[0].shape[1]
    same(prompt, wanted, f"a prompt of {length}")
    pieces = {0, length // 2, min(length // 2 + 1, length), length}
    whole = _in_pieces(run, prompt, len(shown), pieces)
    check_equal(names, whole, wanted, f"a prompt of {length} in pieces", tolerance, checks)
    far = FAR if reach is None else reach - 1
    if 2 * (far + 1) * sum(like[0, :, 0].nbytes for like in shown) > LARGEST:
        return
    later = [drawn(2, 1), *caches(2, far)]
    try:
        wanted = results_of(flat, later)
    except Exception:
        if reach is None:  # as above
            return
        raise
    same(later, wanted, f"one token after {far}")
    if reach is not None:
        end = f"position {reach}, although its tables or caches end after {reach}"
        _must_fail(run, [drawn(1, 1), *caches(1, reach)], "one token past the end", end)


def check_full(flat: Flat, run: Callable[..., Arrays], memory: Draw) -> None:
    """Raise unless a graph with caches of any one length fails where they are full."""
    tokens, *shown = flat.inputs()
    seen = memory(1)
    caches = [like.new_zeros((1, like.shape[1], FULL, like.shape[3])) for like in shown[: len(shown) - len(seen)]]
    end = f"position {FULL}, although its caches hold {FULL}"
    _must_fail(run, [tokens[:1, :1], *caches, *seen], "one token more than the caches hold", end, length=FULL)


def _in_pieces(run: Run, prompt: Sequence[Tensor], caches: int, cuts: Iterable[int]) -> Arrays:
    tokens, past, memory = prompt[0], list(prompt[1 : 1 + caches]), prompt[1 + caches :]
    logits = []
    for start, stop in pairwise(sorted(cuts)):
        results = run([tokens[:, start:stop], *past, *memory], f"positions {start} … {stop - 1} of a prompt")
        logits.append(torch.from_numpy(results[0]))
        past = [torch.from_numpy(array) for array in results[1:]]
    return [torch.cat(logits, dim=1).numpy(), *(tensor.numpy() for tensor in past)]


def _must_fail(run: Callable[..., Arrays], inputs: Sequence[Tensor], case: str, end: str, **options: Any) -> None:
    try:
        run(inputs, case, **options)
    except RuntimeError:
        return
    raise RuntimeError(f"the exported graph gives numbers for {end}")


CASES = ((1, 1, 1), (3, 7, 4), (2, 150, 20))
"""The rows, the length of the memory, and the length of the text before single tokens."""


def check_parts(
    parts: Sequence[GraphPart], files: Sequence[Path], tolerance: float | None, checks: list[Check], *,
    operator: bool = False,
) -> None:  # fmt: skip
    """Raise unless each graph, given torch's results of the part before, gives torch's results."""
    runs = [runner(file, part.inputs, operator=operator) for part, file in zip(parts, files, strict=True)]
    model: Any = parts[0].module.model
    generator = torch.Generator("cpu").manual_seed(1)
    vocabulary = model.config.vocab_size

    def text(rows: int, length: int) -> Tensor:
        return torch.randint(vocabulary, (rows, length), generator=generator, dtype=torch.int64, device="cpu")

    def results(which: int, inputs: Sequence[Tensor]) -> dict[str, Tensor]:
        part = parts[which]
        return dict(zip(part.outputs, results_of(Flat(part.module, _arguments(part, inputs), {}), inputs), strict=True))

    def same(which: int, inputs: Sequence[Tensor], right: Mapping[str, Tensor], case: str) -> None:
        outputs = parts[which].outputs
        wanted, where = [right[name] for name in outputs], f"{files[which].name}, {case}"
        check_equal(outputs, runs[which](inputs, case), wanted, where, tolerance, checks)

    for rows, memory_length, length in CASES:
        case = f"{rows} rows, a memory of {memory_length} and a text of {length}"
        mask = torch.ones((rows, memory_length), dtype=torch.int64, device="cpu")
        if rows > 1:
            mask[-1, memory_length // 2 + 1 :] = 0
        source = [source_of(model, rows, memory_length, generator), mask]
        encoded = results(ENCODER, source)
        same(ENCODER, source, encoded, case)
        memory, start = list(encoded.values()), [mask, text(rows, length)]
        made = results(FIRST, [*start, *memory])
        same(FIRST, [*start, *memory], made, case)
        same(OF_MEMORY, memory, made, case)
        caches = {name: made[name] for name in parts[FIRST].outputs[1:]}
        nothing = [x[:, :, :0] if ".decoder." in name else x for name, x in caches.items()]
        same(LATER, [*start, *nothing], made, f"{case}, no past")
        for pieces in (1, 1, 3):
            given = [mask, text(rows, pieces), *caches.values()]
            made = results(LATER, given)
            same(LATER, given, made, f"{case}, {pieces} more")
            caches |= {name: made[name] for name in parts[LATER].outputs[1:]}


def _arguments(part: GraphPart, inputs: Sequence[Tensor]) -> tuple[Any, ...]:
    first = len([x for x in part.example if isinstance(x, Tensor)])
    if first == len(inputs):
        return tuple(inputs)
    return (*inputs[:first], [list(inputs[at : at + 4]) for at in range(first, len(inputs), 4)])
