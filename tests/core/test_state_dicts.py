"""State dicts of other code bases as blocks: the weights they hold, and an error by name for each key that is wrong."""

import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray

from relskew_core import BlockSpec, Span, attention_block, conventions

Floats = NDArray[Any]
State = dict[str, Any]
OURS = ("q_proj", "k_proj", "v_proj", "out_proj")
HEADS, D, E = 3, 4, 8  # no matrix is square, so that its transpose has another shape
SHAPES = {name: (E, HEADS * D) if name == "out_proj" else (HEADS * D, E) for name in OURS}
RNG = np.random.default_rng(4)


def projections(names: tuple[str, ...], *, bias: bool = True, kernels: bool = False) -> State:
    """Random projections by name."""
    state = {}
    for our, their in zip(OURS, names, strict=True):
        weight = RNG.standard_normal(SHAPES[our])
        state[f"{their}/kernel" if kernels else f"{their}.weight"] = weight.T if kernels else weight
        if bias:
            state[f"{their}.bias"] = RNG.standard_normal(SHAPES[our][0])
    return state


def renamed(state: State, names: tuple[str, ...]) -> State:
    return {f"{our}.{kind}": state[f"{their}.{kind}"] for our, their in zip(OURS, names, strict=True)
            for kind in ("weight", "bias") if f"{their}.{kind}" in state}  # fmt: skip


class Case(NamedTuple):
    """A state dict, the call that loads it, and what must come: the spec's fields and the weights."""

    name: str
    state: State
    load: Callable[..., tuple[BlockSpec, dict[str, Any]]]
    fields: dict[str, Any]
    weights: State

    def __str__(self) -> str:
        return self.name


def same(weights: dict[str, Any], case: Case) -> None:
    assert set(weights) == set(case.weights)
    for key, weight in case.weights.items():
        np.testing.assert_array_equal(weights[key], weight)


def vits(heads: int) -> Case:
    state = projections(OURS) | {f"emb_{name}": RNG.standard_normal((heads, 5, D)) for name in ("rel_k", "rel_v")}
    tables = {name: state[f"emb_{name}"][0] if heads == 1 else state[f"emb_{name}"] for name in ("rel_k", "rel_v")}
    fields = {"span": Span(2, 2, "zero"), "shared_table": heads == 1, "rel_values": True}
    return Case(f"vits, {heads}", state, conventions.load_vits, fields, renamed(state, OURS) | tables)


def vits_of_its_authors() -> Case:
    """Names as in ``attentions.py`` of jaywalnut310/vits, which Piper, Coqui TTS and MeloTTS have kept."""
    case = vits(1)
    convolutions = {f"conv_{key[0]}.{key.partition('.')[2]}": x for key, x in case.state.items() if "proj" in key}
    state = {key: x[..., None] if key.endswith("weight") else x for key, x in convolutions.items()}
    tables = {key: x for key, x in case.state.items() if key.startswith("emb")}
    return case._replace(name="vits, its authors'", state=state | tables)


def wav2vec2_bert() -> Case:
    names = ("linear_q", "linear_k", "linear_v", "linear_out")
    state = projections(names) | {"distance_embedding.weight": RNG.standard_normal((8, D))}
    load = functools.partial(conventions.load_wav2vec2_bert, left=5, right=2)
    want = renamed(state, names) | {"rel_k": state["distance_embedding.weight"]}
    return Case("wav2vec2_bert", state, load, {"span": Span(5, 2, "clip"), "shared_table": True}, want)


def tensor2tensor(kind: str) -> Case:
    state = projections(("q", "k", "v", "output_transform"), bias=False, kernels=True)
    want = {f"{our}.weight": kernel.T for our, kernel in zip(OURS, state.values(), strict=True)}
    scope, heads = "dot_product_self_attention_relative_v2", () if kind == "clipped" else (HEADS,)
    suffixes = ("key_relative_embeddings", "value_relative_embeddings")
    if kind == "clipped":
        suffixes = ("relative_positions_keys/embeddings", "relative_positions_values/embeddings")
    for name, suffix in zip(("rel_k", "rel_v")[: 1 if kind == "causal" else 2], suffixes, strict=False):
        want[name] = state[f"{scope}/{suffix}"] = RNG.standard_normal((*heads, 5, D))
    span = {"causal": Span(4, 0, "zero"), "unmasked": Span(2, 2, "zero"), "clipped": Span(2, 2, "clip")}[kind]
    fields = {"span": span, "causal": kind == "causal", "shared_table": kind == "clipped", "bias": False,
              "rel_values": kind != "causal"}  # fmt: skip
    load = functools.partial(conventions.load_tensor2tensor, causal=kind == "causal")
    return Case(f"tensor2tensor, {kind}", state, load, fields, want)


def gwinndr(*, bias: bool) -> Case:
    want = renamed(projections(OURS, bias=bias), OURS)
    state = {"in_proj_weight": np.concatenate([want[f"{name}.weight"] for name in OURS[:3]])}
    if bias:
        state["in_proj_bias"] = np.concatenate([want[f"{name}.bias"] for name in OURS[:3]])
    state |= {key: weight for key, weight in want.items() if key.startswith("out_proj")}
    want["rel_k"] = state["Er"] = RNG.standard_normal((6, D))
    fields = {"span": Span.causal(6), "causal": True, "shared_table": True, "bias": bias}
    return Case(f"gwinndr, {bias=}", state, conventions.load_music_transformer, fields, want)


def jason9693() -> Case:
    names = ("Wq", "Wk", "Wv", "fc")
    state = projections(names) | {"E": RNG.standard_normal((6, D))}
    fields, want = {"span": Span.causal(6), "causal": True, "shared_table": True}, renamed(state, names)
    return Case("jason9693", state, conventions.load_music_transformer, fields, want | {"rel_k": state["E"]})


def spectraldoy(*, bias: bool) -> Case:
    names = ("wq", "wk", "wv", "wo")
    state = projections(names) | {"E.weight": RNG.standard_normal((6, HEADS * D))}
    want = renamed(state, names) | {"rel_k": np.stack(np.split(state["E.weight"], HEADS, axis=1))}
    if not bias:  # it always has an output bias
        state = {key: weight for key, weight in state.items() if not re.match(r"w[qkv]\.bias", key)}
        want |= {f"{name}.bias": np.zeros(HEADS * D) for name in OURS[:3]}
    fields = {"span": Span(5, 0, "clip"), "causal": True, "shared_table": False}
    return Case(f"spectraldoy, {bias=}", state, conventions.load_music_transformer, fields, want)


def t5(*, bidirectional: bool) -> Case:
    state = projections(("q", "k", "v", "o"), bias=False)
    table = state["relative_attention_bias.weight"] = RNG.standard_normal((8, HEADS))
    options: dict[str, Any] = {"bidirectional": bidirectional, "num_buckets": 8, "max_distance": 16}
    rel_bias, span = conventions.T5(**options).load(table)
    want = renamed(state, ("q", "k", "v", "o")) | {"rel_bias": rel_bias}
    want["q_proj.weight"] = want["q_proj.weight"] * 2.0  # exactly the root of D
    fields = {"span": span, "causal": not bidirectional, "rel_keys": False, "rel_bias": True, "bias": False}
    return Case(f"t5, {bidirectional=}", state, functools.partial(conventions.load_t5, **options), fields, want)


def conformer() -> Case:
    state = projections(("linear_q", "linear_k", "linear_v", "linear_out"))
    state |= {"linear_pos.weight": RNG.standard_normal((HEADS * D, E))}
    state |= {f"pos_bias_{name}": RNG.standard_normal((HEADS, D)) for name in "uv"}
    return Case("conformer", state, conventions.load_conformer, {}, {})  # type: ignore[arg-type]  # no spec


CASES = [
    vits(1), vits(HEADS), vits_of_its_authors(), wav2vec2_bert(),
    *map(tensor2tensor, ("causal", "unmasked", "clipped")), gwinndr(bias=True),
    gwinndr(bias=False), jason9693(), spectraldoy(bias=True), spectraldoy(bias=False), t5(bidirectional=True),
    t5(bidirectional=False),
]  # fmt: skip


@pytest.mark.parametrize("prefix", ["", "layers.0/attention."])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_state_dict_is_a_block(case: Case, prefix: str) -> None:
    state = {prefix + key: weight for key, weight in case.state.items()}
    if prefix:
        state["layers.1/attention.q.weight"] = np.zeros(1)  # of another layer
    spec, weights = case.load(state, num_heads=HEADS, prefix=prefix)
    fields = case.fields | {"embed_dim": E, "num_heads": HEADS, "head_dim": D}
    assert {name: getattr(spec, name) for name in fields} == fields
    same(weights, case)
    y: Any = attention_block(np.ones((1, 3, E)), weights, spec)
    assert np.all(np.isfinite(y))


def transposed(array: Floats) -> Floats:
    return np.swapaxes(array, -1, -2) if array.ndim > 1 else array[:, None]


MUTATIONS: dict[str, Callable[[Floats], Any]] = {
    "dropped": lambda _: ...,
    "transposed": transposed,
    "a row short": lambda array: array[..., :-1, :] if array.ndim > 1 else array[:-1],
    "a column short": lambda array: array[..., :-1],
    "empty": lambda array: array[:0],
    "an axis more": lambda array: array[None],
    "no axis": lambda array: array.sum(),
    "integers": lambda array: array.astype(int),
    "another dtype": lambda array: array.astype("float32"),
    "None": lambda _: None,
    "a list": lambda array: array.tolist(),
}
# Tables that only their number of rows describes may have another number: a shorter reach.
OF_ANY_LENGTH = {"key_relative_embeddings", "Er", "E", "E.weight"}


@pytest.mark.parametrize("mutation", MUTATIONS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_key_that_is_wrong_is_named(case: Case, mutation: str) -> None:
    for key, array in case.state.items():
        state = {**case.state, key: MUTATIONS[mutation](array)}
        if mutation == "dropped":
            del state[key]
            if key.endswith("value_relative_embeddings"):  # version 2 may have none
                assert not case.load(state, num_heads=HEADS)[0].rel_values
                continue
        if mutation == "a row short" and key.rpartition("/")[2] in OF_ANY_LENGTH and case.fields["causal"]:
            spec, _ = case.load(state, num_heads=HEADS)
            assert spec.span.left == case.fields["span"].left - 1
            continue
        with pytest.raises((ValueError, TypeError)) as caught:
            case.load(state, num_heads=HEADS)
        message = str(caught.value)
        assert message.startswith(("`state", "`num_heads`")), message
        told = key in message or key.rpartition("/")[2] in message
        assert told or re.search(r"`state\['[\w./]+'\]` must have|the dtype of `state\['", message), message


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_key_that_would_be_lost_is_named(case: Case) -> None:
    with pytest.raises(ValueError, match=r"`state` must have no key under '' but .*, got bias_k$"):
        case.load({**case.state, "bias_k": np.zeros(E)}, num_heads=HEADS)
    if (bias := case.state.get("q/kernel")) is not None:
        case.load({**case.state, "q/kernel/Adam": bias}, num_heads=HEADS)
        with pytest.raises(ValueError, match=r"got q/bias$"):
            case.load({**case.state, "q/bias": np.zeros(HEADS * D)}, num_heads=HEADS)


NO_STATES: list[tuple[dict[str, Any], str]] = [
    ({"state": []}, r"`state` must be a mapping from names to arrays, an onnx.* got list \[\]"),
    ({"state": {}}, "`state` must have .*; its keys there are none"),
    ({"prefix": None}, "`prefix` must be a str, got None"),
    ({"num_heads": 3.0}, "`num_heads` must be an int, got float"),
    ({"num_heads": 5}, r"`num_heads` must divide the width of the queries, 12 in `state\['.*'\]`, got 5"),
    ({"num_heads": 2}, r"`state\['.*'\]` must have shape .* = .*, got ndarray"),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=str)
def test_what_is_no_state_dict_is_named(case: Case) -> None:
    for given, words in NO_STATES[: -1 if "spectraldoy" in case.name else None]:  # its table is as wide as all heads
        with pytest.raises((TypeError, ValueError), match=words):
            case.load(**{"state": case.state, "num_heads": HEADS, **given})


@pytest.mark.parametrize("case", [*CASES, conformer()], ids=str)
def test_a_wrong_prefix_is_answered_by_those_that_are_there(case: Case) -> None:
    last = "/" if any("/" in key for key in case.state) else "."
    there = [f"decoder{last}layers{last}{index}{last}" for index in (3, 5)]
    state = {prefix + key: array for prefix in there for key, array in case.state.items()}
    state |= {f"a{index}": np.zeros(1) for index in range(20)}  # first in the alphabet
    for wrong in ("", f"encoder{last}layers{last}3{last}", f"decoder{last}layers{last}"):
        with pytest.raises(ValueError, match="`prefix` must be one of those in `state`, ") as caught:
            case.load(state, num_heads=HEADS, prefix=wrong)
        assert str(caught.value).endswith(f"`state`, {there[0]!r}, {there[1]!r}, got {wrong!r}")
    with pytest.raises(ValueError, match="`prefix` must end in") as caught:
        case.load(state, num_heads=HEADS, prefix=there[1][:-1])
    assert str(caught.value).endswith(f" {last!r}: {there[1]!r}, got {there[1][:-1]!r}")
    case.load(state, num_heads=HEADS, prefix=there[1])


def test_an_empty_prefix_means_that_of_the_only_attention() -> None:
    case = vits_of_its_authors()
    state = {f"enc.{key}": array for key, array in case.state.items()} | {"decoder.weight": np.zeros(1)}
    same(case.load(state, num_heads=HEADS)[1], case)


def test_the_weights_of_an_onnx_file(tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx")
    for case in (vits_of_its_authors(), tensor2tensor("causal")):
        tensors = [onnx.numpy_helper.from_array(array, f"enc/{key}") for key, array in case.state.items()]
        model = onnx.helper.make_model(onnx.helper.make_graph([], "voice", [], [], tensors))
        onnx.save(model, tmp_path / "voice.onnx")
        for given in (model, tmp_path / "voice.onnx", str(tmp_path / "voice.onnx")):
            same(case.load(given, num_heads=HEADS, prefix="enc/")[1], case)


def test_tables_of_two_conventions_are_not_one() -> None:
    case = tensor2tensor("unmasked")
    mixed = {key: array for key, array in case.state.items() if "value_relative" not in key}
    mixed["a/relative_positions_values/embeddings"] = np.zeros((5, D))
    with pytest.raises(ValueError, match=r"`state` must have the tables of one version .*, got a/rel.*, dot.*key_rel"):
        case.load(mixed, num_heads=HEADS)
    shared = {**case.state, "dot_product_self_attention_relative_v2/value_relative_embeddings": np.zeros((5, D))}
    by_head = r"value_relative_embeddings'\]` must have shape \(H, R, D\) with H = 3, R = 5"
    with pytest.raises(ValueError, match=by_head):
        case.load(shared, num_heads=HEADS)
    case = vits(1)
    with pytest.raises(ValueError, match=r"`state\['emb_rel_v'\]` must have shape \(1, R, D\) with R = 5, D = 4, got"):
        case.load({**case.state, "emb_rel_v": np.zeros((HEADS, 5, D))}, num_heads=HEADS)


def test_a_prefix_singles_out_one_attention() -> None:
    case = tensor2tensor("causal")
    state = {**case.state, "b/key_relative_embeddings": np.zeros((5, D))}
    with pytest.raises(ValueError, match=r"`prefix` must single out one attention, got '' with b/key_rel.*, dot"):
        case.load(state, num_heads=HEADS)


def test_local_attention_of_tensor2tensor() -> None:
    spec, _ = conventions.load_tensor2tensor(tensor2tensor("causal").state, num_heads=HEADS, causal=True, block_size=3)
    assert spec.block_size == 3


def test_t5_takes_the_bias_of_the_first_layer() -> None:
    case = t5(bidirectional=True)
    bias = "relative_attention_bias.weight"
    state = {("first." if key == bias else "third.") + key: weight for key, weight in case.state.items()}
    _, weights = case.load(state, num_heads=HEADS, prefix="third.", bias_prefix="first.")
    np.testing.assert_array_equal(weights["rel_bias"], case.weights["rel_bias"])
    with pytest.raises(ValueError, match=r"`bias_prefix` must be one of those in `state`, 'first\.', got 'third\.'"):
        case.load(state, num_heads=HEADS, prefix="third.")
    with pytest.raises(ValueError, match=r"`bias_prefix` must end in '\.': 'first\.', got 'first'"):
        case.load(state, num_heads=HEADS, prefix="third.", bias_prefix="first")


def text_encoder() -> State:
    """A text encoder of two layers with the names of VITS' authors."""
    state = {"emb.weight": RNG.standard_normal((11, 8)), "proj.weight": RNG.standard_normal((6, 8, 1))}
    state["proj.bias"] = RNG.standard_normal(6)
    for layer in ("0", "1"):
        for name in "kv":
            state[f"encoder.attn_layers.{layer}.emb_rel_{name}"] = RNG.standard_normal((1, 5, 4))
        shapes = {f"attn_layers.{layer}.conv_{name}": (8, 8, 1) for name in "qkvo"}
        shapes |= {f"ffn_layers.{layer}.conv_1": (12, 8, 3), f"ffn_layers.{layer}.conv_2": (8, 12, 3)}
        for name, shape in shapes.items():
            state[f"encoder.{name}.weight"] = RNG.standard_normal(shape)
            state[f"encoder.{name}.bias"] = RNG.standard_normal(shape[0])
        norms = [f"norm_layers_{index}.{layer}.{kind}" for index in (1, 2) for kind in ("gamma", "beta")]
        state |= {f"encoder.{norm}": RNG.standard_normal(8) for norm in norms}
    return state


def test_a_whole_text_encoder() -> None:
    """Its numbers are compared in ``tests/peers/test_speech.py``."""
    state = text_encoder()
    config, weights = conventions.load_vits_encoder(state)
    assert config.pop("attn_implementation") == "eager"
    assert config == {"vocab_size": 11, "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2,
                      "window_size": 2, "ffn_dim": 12, "ffn_kernel_size": 3, "flow_size": 3}  # fmt: skip
    assert len(weights) == len(state)
    voice = {f"enc_p.{key}": array for key, array in state.items()} | {"dec.weight": np.zeros(1)}
    for given in ({**voice, "sid": np.zeros(1)}, {**voice, "sid": voice["enc_p.emb.weight"]}):
        if given["sid"].ndim == 2:  # of Piper
            del given["enc_p.emb.weight"]
        again, found = conventions.load_vits_encoder(given)
        assert config.items() < again.items()
        assert all(found[key] is array or np.array_equal(found[key], array) for key, array in weights.items())


@pytest.mark.parametrize("mutation", [name for name in MUTATIONS if name != "a row short"])
def test_every_key_of_a_text_encoder_that_is_wrong_is_named(mutation: str) -> None:
    """A row less in the embedding is another vocabulary."""
    state = text_encoder()
    for key, array in state.items():
        wrong = {**state, key: MUTATIONS[mutation](array)}
        if mutation == "dropped":
            del wrong[key]
        with pytest.raises((ValueError, TypeError), match=r"^`state"):
            conventions.load_vits_encoder(wrong)


def test_errors_of_a_text_encoder_say_what_is_there() -> None:
    state = text_encoder()
    voice = {f"{prefix}{key}": array for prefix in ("enc_p.", "enc_q.") for key, array in state.items()}
    by_head = {key: np.repeat(array, 2, 0) if "emb_rel" in key else array for key, array in state.items()}
    narrow = {key: array[..., :3] if "emb_rel" in key else array for key, array in state.items()}
    wrong: list[tuple[State, str, str]] = [
        (voice, "", r"`prefix` must be one of those in `state`, 'enc_p.', 'enc_q.', got ''$"),
        (voice, "enc_p", r"`prefix` must end in '\.': 'enc_p\.', got 'enc_p'$"),
        ({**state, "tone_emb.weight": np.zeros((3, 8))}, "",
         "must have no key under '' but .*, got tone_emb.weight; docs/piper.md"),
        (by_head, "", r"emb_rel_k'\]` must have shape \(1, R, D\).*, got ndarray"),
        (narrow, "", r"emb_rel_k'\]` must have the width of a head, a divisor of 8, got 3"),
    ]  # fmt: skip
    for given, prefix, words in wrong:
        with pytest.raises(ValueError, match=words):
            conventions.load_vits_encoder(given, prefix=prefix)
