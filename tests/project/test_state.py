"""Everything that may hold state has a test that empties or poisons it: the places are found in the source."""

from pathlib import Path

import pytest

import state

TESTS = Path(__file__).parents[1]
TRACED = "layers/inside_kept.py::test_nothing_of_a_traced_call_is_kept"
LIVES = "huggingface/test_lives.py::test_a_step_changes_no_result"
SHARDS = "layers/test_whole_models.py::test_tensor_parallelism_and_fsdp_in_two_processes"
FAMILIES = "peers/test_families_lives.py::test_a_step_changes_both_alike"
FOLLOWED = "peers/test_families_caches.py::test_what_changes_a_dynamic_cache_changes_it_in_place_as_well"
KINDS = "huggingface/inside_families.py::test_what_is_not_supported_stays_as_it_is"
WINDOWS = "huggingface/inside_families.py::test_a_window_hides"
CONTINUED = "layers/test_caches.py::test_every_continuation_of_a_growing_cache_has_keys_of_its_own"

TABLE = {
    "backends.__init__._prepared": TRACED,
    "backends._compiled.availability._warn": "backends/inside_without_kernels.py::_warn.cache_clear",
    "backends._jax.foreign.is_registered": "backends/inside_jax_compiled.py::is_registered",
    "backends._threads._numpy_threads": "backends/inside_compiled.py::test_a_short_call_is_for_one_thread",
    "backends._torch.cpu.threads._address": "backends/inside_compiled.py::test_the_threads_of_torch_are_found",
    "backends._torch.cpu.threads._forked": "backends/inside_compiled.py::test_the_threads_of_torch_are_found",
    "backends._torch.cpu.threads._symbol": "backends/inside_compiled.py::test_the_threads_of_torch_are_found",
    "backends._torch.decomposed._WARNED": "export/test_torch.py::_with_one_warning",
    "backends._torch.decomposed._decompositions": "backends/inside_private_names.py::private",
    "backends._torch.decomposed._shapes": "backends/inside_private_names.py::private",
    "backends._torch.triton.self_check._verdict": "support/triton_host.py::_verdict.cache_clear",
    "export._generate.generate._kept": "export/test_encoder_decoder.py::test_a_forked_process_opens_its_sessions",
    "export._models.exporters._chosen": "peers/test_exporters.py::register_exporters(operator=True)",
    "relskew_core._block.spec._buckets": TRACED,
    "relskew_core._functions.prepared._alike": TRACED,
    "relskew_core._functions.prepared._checked": TRACED,
    "relskew_core._kernel.grids.places": "backends/inside_grids.py::places.cache_clear",
    "relskew_core.distributed.torch._style.register_sharding": "support/split/models.py::register_sharding",
    "relskew_core.huggingface._attend.DropIn.known": KINDS,
    "relskew_core.huggingface._attend: original.__class__": "huggingface/test_hooked.py::def test_",
    "relskew_core.huggingface._images: self.held": LIVES,
    "relskew_core.huggingface._deberta._deberta_rows": TRACED,
    "relskew_core.huggingface._xlnet: self.pooling_mult": FAMILIES,
    "relskew_core.huggingface._xlnet: self.seq_len": FAMILIES,
    "relskew_core.huggingface._replace: part.window": WINDOWS,
    "relskew_core.huggingface._attend: part._convert_4d_mask_to_blocked_5d": "peers/test_speech.py::test_gemma_4",
    "relskew_core.huggingface._attend: part.config": WINDOWS,
    "relskew_core.huggingface._attend: part.config._attn_implementation": WINDOWS,
    "relskew_core.huggingface._attend: layer.keys": FOLLOWED,
    "relskew_core.huggingface._attend: layer.relskew_room": FOLLOWED,
    "relskew_core.huggingface._attend: layer.values": FOLLOWED,
    "relskew_core.huggingface._register._may_cross": "peers/test_families_registered.py::test_",
    "relskew_core.huggingface._register: mask.relskew_offset": "peers/test_families_registered.py::test_",
    "relskew_core.huggingface._t5: past.is_updated": "huggingface/inside_families.py::test_a_cache_of_either_name",
    "relskew_core.layers.flax._relative: self.deterministic": "layers/test_flax.py::deterministic",
    "relskew_core.layers.torch._attention.buckets": TRACED,
    "relskew_core.layers.torch._caches: present.room": CONTINUED,
    "relskew_core.layers.torch._caches: self.ends": CONTINUED,
    "relskew_core.layers.torch._caches: self.keys": CONTINUED,
    "relskew_core.layers.torch._caches: self.last": FOLLOWED,
    "relskew_core.layers.torch._caches: self.values": CONTINUED,
    "relskew_core.layers.torch._attention.rows_of_sinusoids": TRACED,
    "relskew_core.layers.torch._attention.slopes": TRACED,
    "relskew_core.layers.torch.parallel: module.processes": SHARDS,
    "relskew_core.layers.torch.parallel: module.rank": SHARDS,
}  # fmt: skip
"""Module-level containers, cached functions, attributes of modules and of tensors; "file::text" of the test."""


def test_every_place_has_a_test() -> None:
    assert state.places() == TABLE.keys()


@pytest.mark.parametrize("test", sorted(set(TABLE.values())))
def test_the_tests_are_there(test: str) -> None:
    file, _, text = test.partition("::")
    assert text in (TESTS / file).read_text()


def test_no_module_has_buffers() -> None:
    """Averages, casts, states and offloading would change what no state has."""
    for folder in ("relskew_core", "backends", "export"):
        for path in (TESTS.parent / folder).rglob("*.py"):
            assert "register_buffer(" not in path.read_text(), path
