"""Everything that may hold state has a test that empties or poisons it: the places are found in the source."""

from pathlib import Path

import pytest

import state

TESTS = Path(__file__).parents[1]
TESTED_IN = {
    "layers/inside_kept.py::test_nothing_of_a_traced_call_is_kept":
        "backends.__init__._prepared; relskew_core._block.spec._buckets; relskew_core._functions.prepared._alike; "
        "relskew_core._functions.prepared._checked; relskew_core.huggingface._deberta._deberta_rows; "
        "relskew_core.layers.torch._attention.buckets; relskew_core.layers.torch._attention.rows_of_sinusoids; "
        "relskew_core.layers.torch._attention.slopes",
    "backends/inside_without_kernels.py::_warn.cache_clear": "backends._compiled.availability._warn",
    "backends/inside_jax_compiled.py::is_registered": "backends._jax.foreign.is_registered",
    "backends/inside_compiled.py::test_a_short_call_is_for_one_thread": "backends._threads._numpy_threads",
    "backends/inside_compiled.py::test_the_threads_of_torch_are_found":
        "backends._torch.cpu.threads._address; backends._torch.cpu.threads._forked; "
        "backends._torch.cpu.threads._symbol",
    "export/test_torch.py::_with_one_warning": "backends._torch.decomposed._WARNED",
    "backends/inside_private_names.py::private":
        "backends._torch.decomposed._decompositions; backends._torch.decomposed._shapes",
    "support/triton_host.py::_verdict.cache_clear": "backends._torch.triton.self_check._verdict",
    "export/test_encoder_decoder.py::test_a_forked_process_opens_its_sessions": "export._generate.generate._kept",
    "peers/test_exporters.py::register_exporters(operator=True)": "export._models.exporters._chosen",
    "backends/inside_grids.py::places.cache_clear": "relskew_core._kernel.grids.places",
    "support/split/models.py::register_sharding": "relskew_core.distributed.torch._style.register_sharding",
    "huggingface/inside_families.py::test_what_is_not_supported_stays_as_it_is":
        "relskew_core.huggingface._attend.DropIn.known",
    "huggingface/test_hooked.py::def test_": "relskew_core.huggingface._attend: original.__class__",
    "huggingface/test_lives.py::test_a_step_changes_no_result": "relskew_core.huggingface._images: self.held",
    "peers/test_families_lives.py::test_a_step_changes_both_alike":
        "relskew_core.huggingface._xlnet: self.pooling_mult; relskew_core.huggingface._xlnet: self.seq_len",
    "huggingface/inside_families.py::test_a_window_hides":
        "relskew_core.huggingface._replace: part.window; relskew_core.huggingface._attend: part.config; "
        "relskew_core.huggingface._attend: part.config._attn_implementation",
    "peers/test_speech.py::test_gemma_4": "relskew_core.huggingface._attend: part._convert_4d_mask_to_blocked_5d",
    "peers/test_families_caches.py::test_what_changes_a_dynamic_cache_changes_it_in_place_as_well":
        "relskew_core.huggingface._attend: layer.keys; relskew_core.huggingface._attend: layer.relskew_room; "
        "relskew_core.huggingface._attend: layer.values; relskew_core.layers.torch._caches: self.last",
    "peers/test_families_registered.py::test_":
        "relskew_core.huggingface._register._may_cross; relskew_core.huggingface._register: mask.relskew_offset",
    "huggingface/inside_families.py::test_a_cache_of_either_name": "relskew_core.huggingface._t5: past.is_updated",
    "layers/test_flax.py::deterministic": "relskew_core.layers.flax._relative: self.deterministic",
    "layers/test_caches.py::test_every_continuation_of_a_growing_cache_has_keys_of_its_own":
        "relskew_core.layers.torch._caches: present.room; relskew_core.layers.torch._caches: self.ends; "
        "relskew_core.layers.torch._caches: self.keys; relskew_core.layers.torch._caches: self.values",
    "layers/test_whole_models.py::test_tensor_parallelism_and_fsdp_in_two_processes":
        "relskew_core.layers.torch.parallel: module.processes; relskew_core.layers.torch.parallel: module.rank",
}  # fmt: skip
"""Tests as file::text, and what they empty or poison: module-level containers, cached functions, attributes."""


def test_every_place_has_a_test() -> None:
    assert state.places() == {place for places in TESTED_IN.values() for place in places.split("; ")}


@pytest.mark.parametrize("test", TESTED_IN)
def test_the_tests_are_there(test: str) -> None:
    file, _, text = test.partition("::")
    assert text in (TESTS / file).read_text()


def test_no_module_has_buffers() -> None:
    """Averages, casts, states and offloading would change what no state has."""
    for folder in ("relskew_core", "backends", "export"):
        for path in (TESTS.parent / folder).rglob("*.py"):
            assert "register_buffer(" not in path.read_text(), path
