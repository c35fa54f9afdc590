"""Validation: comparison of a model with the float64 definition of its block, in the runtimes that will run it."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import onnx

from relskew_core._array.checks import check_int, check_real, explains
from relskew_core._block.spec import BlockSpec, check_spec
from relskew_core.export._check.inspect import Check, Report, reason
from relskew_core.export._check.isolated import run_isolated
from relskew_core.export._check.questions import Request, run
from relskew_core.export._check.runtimes import Provider, Runtime, provider_name
from relskew_core.export._form.weights import to_numpy

TIME_LIMIT = 600.0
_KINDS = {
    stat.S_ISDIR: "a directory", stat.S_ISFIFO: "a named pipe", stat.S_ISSOCK: "a socket", stat.S_ISCHR: "a device",
    stat.S_ISBLK: "a device",
}  # fmt: skip


@explains
def validate(
    model_or_path: onnx.ModelProto | str | os.PathLike[str],
    spec: BlockSpec,
    weights: Mapping[str, Any],
    *,
    providers: Sequence[Provider] = ("CPUExecutionProvider",),
    lengths: Sequence[int] | None = None,
    batches: Sequence[int] | None = None,
    runtimes: Sequence[Runtime] = ("onnxruntime",),
    atol: float | None = None,
    tolerance: float | None = None,
    seed: int | None = None,
    time_limit: float | None = None,
    memory_limit: int | None = None,
    progress: Callable[[str], None] | None = None,
) -> Report:
    """Run a model over a sweep of inputs and compare it with the block's definition in float64.

    The checks are: the format of the file, its inputs and outputs; the stored weights, bit for bit; and in each
    runtime: where the nodes run; every output by its relative L2 error (float64 1e-12, float32 2e-6, float16 3e-3,
    bfloat16 2e-2; more in proportion if logits exceed 16, because rounding such a logit alone costs that); that inputs
    past the table's reach fail; that decoding in pieces equals decoding at once; that an empty batch gives empty
    outputs, unless onnxruntime has no operator that accepts it; and that the runtime's optimiser changes nothing. Some
    inputs have large logits, which distinguish a hidden key from one that is only unlikely.

    Parameters
    ----------
    model_or_path : onnx.ModelProto, str or path-like
        The model, or its file.
    spec : BlockSpec
        What the block should be.
    weights : mapping of str to array
        The weights that it should have, arrays of any library.
    providers : sequence of str or (str, dict), default ("CPUExecutionProvider",)
        Execution providers of onnxruntime, each tried alone, with their options if wanted; ``"cpu"``, ``"cuda"`` and
        ``"tensorrt"`` for short. TF32 is off on CUDA unless the options ask for it.
    lengths : sequence of int, optional
        Lengths to try; by default short ones, every length at an edge of the table or a chunk, the longest, others
        between these so that no range that ends half beyond its start is left out, and some that are drawn.
    batches : sequence of int, optional
        Batch sizes to try; by default 1, 2 and 3, larger ones with the lengths that are drawn, and on CPUs an empty
        batch.
    runtimes : sequence of {"onnxruntime", "reference", "openvino"}, default ("onnxruntime",)
        The runtimes that run the model: onnxruntime, the reference evaluator of onnx, OpenVINO. On CPUs, a model with
        nodes of the operator is run twice in onnxruntime, without the operator library and with it.
    atol : float, optional
        Largest allowed difference of any number of an output, in addition to the relative error. It grows in proportion
        to large logits, as the tolerance does.
    tolerance : float, optional
        Allowed relative error of the outputs, instead of the error that rounding explains: for quantised models, whose
        weights then need not be stored bit for bit, and whose operators may be those of onnxruntime.
    seed : int, optional
        Seed of the lengths and batches that are drawn in addition to the sweep; by default it is derived from the
        model, so the same file is always checked with the same ones. The report contains the seed.
    time_limit : float, optional
        Time limit in seconds. A file, which may be untrusted, is read and run in a separate process, which is stopped
        after 600 s by default. A ``ModelProto`` runs in this process, without a limit unless you set one.
    memory_limit : int, optional
        Memory limit of the process in bytes, on Linux; by default 8 GiB plus 16 times the weights on CPUs, and none on
        devices.
    progress : callable, optional
        Called with the name of each case before it is tried.

    Returns
    -------
    Report
        One check per question and case. No exception is raised: a broken file, a wrong spec, a missing runtime or
        provider, a provider on which the matrix products did not run, and a process that was stopped are failed checks.

    Examples
    --------
    >>> from relskew_core import BlockSpec, Span, init_weights
    >>> from relskew_core.export import to_onnx, validate
    >>> spec = BlockSpec(4, 2, Span.causal(8), causal=True)
    >>> weights = init_weights(spec, seed=0)
    >>> report = validate(to_onnx(spec, weights), spec, weights, runtimes=["reference"])
    >>> report.ok
    True

    The result for each check, of which one fails with another table:

    >>> other = {**weights, "rel_k": weights["rel_k"] + 1}
    >>> report = validate(to_onnx(spec, weights), spec, other, runtimes=["reference"])
    >>> report.ok, next(check.name for check in report.checks if not check.ok)
    (False, 'weights')

    A graph with a cache, tried at one length, with the name of each case before it is tried:

    >>> names = []
    >>> cached = to_onnx(spec, weights, past=True)
    >>> quick = {"lengths": [4], "batches": [2], "runtimes": ["reference"]}
    >>> report = validate(cached, spec, weights, **quick, progress=names.append)
    >>> report.ok, len(names) > 1
    (True, True)
    """
    checks: list[Check] = []
    report_progress = progress or (lambda case: None)
    try:
        model, problem = _model_or_file(model_or_path)
        if problem:
            return Report((Check("file", "", "", "", False, detail=problem),), seed)
        seed = _seed_of(model) if seed is None else check_int("seed", seed, minimum=0)
        if atol is not None:
            atol = check_real("atol", atol, positive=True)
        if tolerance is not None:
            tolerance = check_real("tolerance", tolerance, positive=True)
        request = Request(model, spec, weights, providers, runtimes, lengths, batches, atol, tolerance, seed)
        if isinstance(model, onnx.ModelProto) and time_limit is None and memory_limit is None:
            run(request, checks.append, report_progress)
        else:
            seconds = TIME_LIMIT if time_limit is None else check_real("time_limit", time_limit, positive=True)
            portable = _portable(request)
            run_isolated(portable, seconds, _memory_limit(memory_limit, portable), checks.append, report_progress)
    except Exception as error:
        checks.append(Check("validation", "", "", "", False, detail=reason(error)))
    return Report(tuple(checks), seed)


def _model_or_file(model_or_path: Any) -> tuple[Any, str]:
    """Return the model, or the path of a file that can be opened without waiting, or the reason why there is none."""
    if isinstance(model_or_path, onnx.ModelProto):
        return model_or_path, ""
    try:
        path = os.fsdecode(model_or_path)
        mode = os.stat(path).st_mode
    except (TypeError, ValueError, OSError) as error:
        return None, reason(error)
    kind = next((kind for is_kind, kind in _KINDS.items() if is_kind(mode)), "")
    return path, f"must be a regular file, got {kind}: {path}" if kind else ""


def _seed_of(model: Any) -> int:
    """Return a seed derived from a model's computation, or from the beginning and size of a file."""
    digest = hashlib.sha256()
    if isinstance(model, onnx.ModelProto):
        for node in model.graph.node:
            digest.update(node.SerializeToString(deterministic=True))
    else:
        with open(model, "rb") as stream:
            digest.update(stream.read(2**20))
            digest.update(str(stream.seek(0, os.SEEK_END)).encode())
    return int.from_bytes(digest.digest()[:4])


def _portable(request: Request) -> Request:
    check_spec(request.spec)
    if not isinstance(request.weights, Mapping):
        return request  # reading the model reports the error
    return replace(request, weights={key: to_numpy(key, array) for key, array in request.weights.items()})


def _memory_limit(limit: int | None, request: Request) -> int | None:
    if limit is not None:
        return check_int("memory_limit", limit, minimum=1)
    if any(provider_name(provider) != "CPUExecutionProvider" for provider in request.providers):
        return None  # drivers of devices map far more memory than they use
    return 2**33 + 16 * sum(array.nbytes for array in request.weights.values())
