"""Torch models of two causal layers: a training step, decoding, graphs of the compiler; and a streaming Conformer."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar

import torch
import torch.nn.functional as F  # noqa: N812 -- as everybody calls it
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

from benchmarks.runner import Benchmark, Call, Case, Record, as_time, markdown, pivot
from benchmarks.textbook import attended, columns, future, gathered, joined, projected, skewed
from relskew_core import BlockSpec, Span, relative_attention
from relskew_core.layers.torch import ChunkCache, ConformerAttention, MultiheadAttention, RelativeMultiheadAttention

LAYERS, WIDTH, HEADS, VOCABULARY = 2, 512, 8, 256


class Attention(nn.Module):
    """Attention without positions, or with relative logits of a textbook; and a cache of fixed length."""

    def __init__(self, length: int, relative: Callable[[Tensor, Tensor, int], Tensor] | None = None) -> None:
        super().__init__()
        self.relative = relative
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.table = nn.Parameter(torch.randn(HEADS, length, WIDTH // HEADS) * 0.02)

    def forward(self, x: Tensor, past: Any = None) -> Any:
        """Attend, including the past if it is given as keys, values and their number."""
        q, k, v = projected(self, x, HEADS)
        if past is None:
            return joined(self, self.attend(q, k, v))
        keys, values, start = past
        stop = start + x.shape[1]
        keys[:, :, start:stop], values[:, :, start:stop] = k, v
        return joined(self, self.attend(q, keys[:, :, :stop], values[:, :, :stop])), (keys, values, stop)

    def empty_cache(self, batch: int, length: int) -> tuple[Tensor, Tensor, int]:
        keys, values = torch.zeros(2, batch, HEADS, length, WIDTH // HEADS)
        return keys, values, 0

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        n, m = q.shape[2], k.shape[2]
        if self.relative is None:
            return F.scaled_dot_product_attention(q, k, v, is_causal=n == m)
        logits = (q @ k.mT + self.relative(q, self.table, m)) * q.shape[-1] ** -0.5
        return attended(logits, v, future(n) if n > 1 else None)


def pad_reshape_slice(q: Tensor, table: Tensor, keys: int) -> Tensor:
    """Huang et al. 2018; for one query, the table's last rows have the order of the keys."""
    return q @ table[:, -keys:].mT if q.shape[2] == 1 else skewed(q @ table[:, -q.shape[2] :].mT)


def gather(q: Tensor, table: Tensor, keys: int) -> Tensor:
    """Shaw et al. 2018: a row of the table for each pair."""
    return gathered(q, table, columns(q.shape[2], keys, table.shape[1] - 1, table.shape[1]))


PLAIN, GRAPHS = "no positions", "graphs"
MODELS: dict[str, Callable[[int], nn.Module]] = {
    PLAIN: Attention,
    "RelativeMultiheadAttention": lambda n: RelativeMultiheadAttention(
        BlockSpec(WIDTH, HEADS, Span.causal(n), causal=True)
    ),
    "pad, reshape, slice": lambda n: Attention(n, pad_reshape_slice),
    "a row for each pair": lambda n: Attention(n, gather),
}
LONGEST = {"a row for each pair": 1024}


class CausalModel(nn.Module):
    """Layers with pre-normalisation, as usual."""

    def __init__(self, attention: Callable[[int], nn.Module], length: int) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.attention: Any = nn.ModuleList(attention(length) for _ in range(LAYERS))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2 * LAYERS))
        self.mlps = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)) for _ in range(LAYERS)
        )

    def forward(self, tokens: Tensor, past: list[Any] | None = None) -> Any:
        x, present = self.embed(tokens), []
        layers: Any = zip(self.attention, self.mlps, self.norms[::2], self.norms[1::2], strict=True)
        for number, (attention, mlp, before, between) in enumerate(layers):
            if past is None:
                y = attention(before(x))
            else:
                y, cache = attention(before(x), past=past[number])
                present.append(cache)
            x = x + y
            x = x + mlp(between(x))
        return self.head(x) if past is None else (self.head(x), present)

    def empty_cache(self, length: int) -> list[Any]:
        return [attention.empty_cache(1, length=length) for attention in self.attention]


def step(name: str, length: int, batch: int) -> Call:
    model = CausalModel(MODELS[name], length)
    tokens = torch.randint(VOCABULARY, (batch, length))

    def call() -> None:
        model.zero_grad(set_to_none=True)
        F.cross_entropy(model(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).backward()

    return call


def decode(name: str, prompt: int, new: int = 20) -> Call:
    """Return a function that decodes some tokens greedily after a prompt, which is not timed."""
    model = CausalModel(MODELS[name], prompt + new).eval()
    tokens = torch.randint(VOCABULARY, (1, prompt))
    with torch.inference_mode():
        _, filled = model(tokens, model.empty_cache(prompt + new))

    @torch.inference_mode()
    def call() -> None:
        token, past = tokens[:, -1:], filled  # what earlier calls wrote after the prompt is overwritten
        for _ in range(new):
            logits, past = model(token, past)
            token = logits[:, -1:].argmax(-1)

    return call


TASKS: dict[str, tuple[Callable[[str, int], Call], tuple[int, ...]]] = {
    "a step, batch of 8": (lambda name, length: step(name, length, 8), (128,)),
    "a step, batch of 1": (lambda name, length: step(name, length, 1), (1024, 2048)),
    "20 tokens after": (decode, (100, 2000)),
}


def compiled_functions() -> dict[str, Call]:
    """Compile with ``fullgraph=True``, call with other numbers, and return the counts of calls and graphs."""
    table, span = torch.randn(HEADS, 256, 64), Span.causal(256)
    x = torch.randn(1, HEADS, 40, 64, requires_grad=True)
    block = RelativeMultiheadAttention(BlockSpec(64, 4, Span.causal(256), causal=True))
    encoder: Any = nn.TransformerEncoderLayer(64, 4, batch_first=True)
    encoder.self_attn = MultiheadAttention(64, 4, Span.clipped(16), batch_first=True)

    def counted(function: Callable[..., Any], values: Iterable[Any]) -> Call:
        return lambda: _graphs(function, lambda compiled: [compiled(value) for value in values])

    def attend(name: str, values: Iterable[Any], q: Tensor = x) -> Call:
        return counted(lambda y: relative_attention(q, x, x, table, span, causal=True, **{name: y}), values)

    def decoded(**room: Any) -> Call:
        def decode(compiled: Callable[..., Any]) -> list[Any]:
            cache, made = block.empty_cache(1, **room), []
            with torch.no_grad():
                for n in (30, *[1] * 100):
                    y, cache = compiled(torch.randn(1, n, 64), past=cache)
                    made.append(y)
            return made

        return lambda: _graphs(block.eval(), decode)

    lengths = [x[:, :, :n] for n in range(2, 40)]
    return {
        "the function, lengths": counted(lambda y: relative_attention(y, y, y, table, span, causal=True), lengths),
        "the function, `offset`": attend("offset", range(2, 40), x[:, :, :1]),
        "the function, `scale`": attend("scale", [n / 64 for n in range(2, 40)]),
        "the block, lengths and batches": counted(block, [torch.randn(2 + n % 3, n, 64) for n in range(4, 40)]),
        "`nn.TransformerEncoderLayer`, lengths": counted(encoder, [torch.randn(2, n, 64) for n in range(4, 40)]),
        "decoding, growing cache": decoded(),
        "decoding, `length=` cache": decoded(length=200),
        "decoding, `keep=` cache": decoded(keep=100),
    }


def _graphs(function: Callable[..., Any], use: Callable[[Callable[..., Any]], list[Any]]) -> tuple[int, int]:
    torch.compiler.reset()
    counter = CompileCounterWithBackend("aot_eager")
    return len(use(torch.compile(function, fullgraph=True, backend=counter))), counter.frame_count


class Models(Benchmark):
    """Tasks of several sizes, and the compiler's graphs."""

    page = "torch.md"
    seconds = 4.0

    def cases(self) -> Iterator[Case]:
        for task, (_, sizes) in TASKS.items():
            yield from ({"task": task, "size": size} for size in sizes)
        yield from ({"task": GRAPHS, "compiled": name} for name in compiled_functions())

    def contenders(self, case: Case) -> Iterable[str]:
        return ["torch.compile"] if case["task"] == GRAPHS else MODELS

    def skip(self, case: Case, contender: str) -> str | None:
        return "left out to keep the run short" if case.get("size", 0) > LONGEST.get(contender, 10**9) else None

    def prepare(self, case: Case, contender: str) -> Call:
        if case["task"] == GRAPHS:
            return compiled_functions()[case["compiled"]]
        return TASKS[case["task"]][0](contender, case["size"])

    def facts(self, case: Case, contender: str, result: Any) -> Case:
        return dict(zip(("calls", "graphs"), result, strict=True)) if case["task"] == GRAPHS else {}

    def measures_of(self, case: Case) -> set[str]:
        return set() if case["task"] == GRAPHS else {"time"}

    def texts(self, record: Record) -> dict[str, str]:
        def cells() -> Iterator[tuple[str, str, str]]:
            for case, rows in record.by_case():
                for contender, row in rows.items():
                    if row.cpu is not None:
                        name = f"`{contender}`" if contender.isidentifier() else contender
                        text = f"{as_time(row.cpu)} ({row.cpu / (rows[PLAIN].cpu or row.cpu):.2f}×)"
                        yield name, f"{case['task']}, {case['size']}", text

        counts = [(row.case["compiled"], *row.facts.values()) for row in record.measured() if row.facts]
        lines = [(name, str(calls), str(found), str(found - 1)) for name, calls, found in counts]
        graphs = markdown(("compiled", "calls", "graphs", "recompilations"), lines)
        return {"": "\n\n".join([record.where, pivot(cells()), graphs])}


CHUNK, BEFORE = 14, 5
SECONDS = CHUNK * 0.08  # the frames of 10 ms in a chunk, after subsampling by 8


class Step(nn.Module):
    """One chunk with its cache as tensors."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        spec = BlockSpec(WIDTH, HEADS, Span.full(CHUNK * (BEFORE + 1)), block_size=CHUNK, blocks_before=BEFORE)
        self.attention = ConformerAttention(spec)

    def forward(self, chunk: Tensor, keys: Tensor, values: Tensor, length: Tensor) -> tuple[Tensor, ...]:
        y, past = self.attention(chunk, past=ChunkCache(keys, values, length))
        return y, past.keys, past.values, past.length


@functools.cache
def steps(runtime: str) -> tuple[Callable[..., Any], list[Any]]:
    """Return a function of a chunk and a cache, and both at the start."""
    step = Step().eval()
    given = [torch.randn(1, CHUNK, WIDTH), *step.attention.empty_cache(1)]
    if runtime == "torch":
        return torch.inference_mode()(step), given
    from benchmarks.graphs import open_session
    from relskew_core.export import torch_to_onnx

    names = ["chunk", "keys", "values", "length"]
    made = torch_to_onnx(step, tuple(given), input_names=names, vary=dict.fromkeys(names, ()))
    session = open_session(made.SerializeToString())
    return lambda *x: session.run(None, dict(zip(names, x, strict=True))), [x.numpy() for x in given]


class Stream(Benchmark):
    page = "speech.md"
    names = ("the first", "after a minute", "after an hour")
    small: ClassVar[Case] = {"minutes": 0}

    def cases(self) -> Iterator[Case]:
        yield from ({"runtime": name, "minutes": 60} for name in ("torch", "onnxruntime"))

    def prepare(self, case: Case, contender: str) -> Call:
        step, (chunk, *cache) = steps(case["runtime"])
        minutes = min(dict(zip(self.names, (0, 1, 60), strict=True))[contender], case["minutes"])
        for _ in range(int(60 * minutes / SECONDS)):
            _, *cache = step(chunk, *cache)
        return functools.partial(step, chunk, *cache)

    def cells(self, record: Record) -> Iterator[tuple[str, str, str]]:
        for row in record.measured():
            times = "" if row.ratio is None or row.contender == self.names[0] else f", {row.ratio:.2f} times"
            yield row.case["runtime"], row.contender, f"{as_time(row.cpu or 0.0)}{times}"
