"""Any spec within the size limits is checked within 5 s of CPU time and 1 GB."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from seqblocks import graph
from seqblocks.analysis import check
from seqblocks.analysis.steps import steps
from seqblocks.errors import MAX_DIAGNOSTICS, SpecError
from tests.spec import hostile
from tests.spec.seconds import in_time

pytestmark = pytest.mark.filterwarnings("ignore::seqblocks.SpecWarning")  # some of these specs are invalid on purpose

BYTES = 2**30
QUICK = (
    "unknown_top_keys", "scans_in_scans", "scans_of_six_orders", "blocks_that_double_and_are_not_used", "many_uses",
    "lists_of_lists", "a_long_word_in_layers", "map_of_a_long_pattern", "a_long_initialiser",
    "steps_that_double", "steps_that_change_places", "steps_with_many_values", "experts_in_experts",
)  # fmt: skip
LONG = (  # other cases of the same kind, which take less time, run without `long`
    "unknown_ties", "unknown_names", "unknown_uses", "unknown_joined_wires", "unknown_verbs", "map_of_unknown_steps",
    "unknown_parameters_to_own", "missing_block_arguments", "unknown_input_keys", "unknown_words",
    "unknown_keys_of_a_pattern", "names_of_steps_twice",
    "long_expressions_in_layers", "many_defaults_in_layers", "many_arguments_in_layers", "a_chain_of_names",
    "many_bodies_that_see_many_wires", "many_parts_in_layers", "repeats_of_nothing",
    "blocks_that_double_beside_a_fault",
    "shares_with_nothing", "shares_in_shares", "layers_that_share_many_names",
    "map_of_owned_parameters", "map_of_many_layouts",
    "unknown_wires", "unknown_block_arguments", "unknown_parameters_to_init", "unknown_step_keys",
    "unknown_pattern_words", "unknown_recipe_keys", "unknown_names_in_layers", "misspelt_common_keys",
    "many_captures", "many_parameters_to_own", "torn_calls", "repeats_in_repeats", "a_long_let_in_layers",
    "map_of_many_steps_in_layers", "map_of_many_patterns", "map_of_layouts_of_many_names",
    "blocks_that_double_a_fault", "shares_with_parts_of_a_large_step", "faulty_expressions_in_layers",
    "many_faults_in_many_blocks", "many_blocks", "branches_twice", "many_aliases",
    "blocks_with_many_arguments_that_are_steps", "scans_in_scans_that_are_accepted", "a_deep_list",
    "many_wires_in_layers", "steps_in_layers_with_many_names", "a_long_list_in_layers", "keys_twice",
)  # fmt: skip
REFUSED = (
    "scans_in_scans", "scans_of_six_orders", "scans_that_share", "repeats_in_repeats", "repeats_of_nothing",
    "blocks_that_double", "many_arguments_in_layers", "a_long_let_in_layers", "a_long_word_in_layers",
    "many_wires_in_layers", "many_parts_in_layers", "lists_of_lists", "a_deep_list", "map_of_many_patterns",
    "map_of_many_layouts",
    "shares_with_parts_of_a_large_step",
    "steps_that_double", "steps_that_change_places", "steps_with_many_values", "steps_in_layers_with_many_names",
    "experts_in_experts",
)  # fmt: skip
ACCEPTED = (
    "scans_in_scans_that_are_accepted", "as_many_steps_as_there_may_be", "ties_to_many_parameters", "long_patterns",
    "a_chain_of_names", "a_name_that_needs_all_others", "map_of_owned_parameters", "many_parameters_to_own",
    "map_of_layouts_of_many_names",
    "many_uses", "many_blocks", "many_aliases", "layers_that_share_many_names", "shares_in_shares", "a_chain_of_shares",
    "blocks_with_many_arguments_that_are_steps", "many_experts",
)  # fmt: skip


def peak() -> int:
    """Return the peak memory of this process in bytes, or 0 if unknown."""
    if sys.platform != "linux":
        return 0
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def test_every_mark_is_of_a_case() -> None:
    assert {*QUICK, *LONG, *REFUSED, *ACCEPTED} <= set(hostile.CASES)
    assert not {*QUICK} & {*LONG}


def marked(name: str) -> Any:
    mark = pytest.mark.long if name in LONG else () if name in QUICK else pytest.mark.slow
    return pytest.param(name, marks=mark)


@pytest.mark.parametrize("name", [marked(name) for name in hostile.CASES])
def test_an_answer_takes_seconds(name: str) -> None:
    text = hostile.text_of(name)
    before = peak()
    fault: SpecError | None = None
    with in_time(f"{len(text):,} characters"):
        try:
            _, model = check.load_text(text)
            if model:
                graph.count(model.graph)
        except SpecError as error:
            fault = error
    found = fault.diagnostics if fault else ()
    assert len(found) <= MAX_DIAGNOSTICS
    assert max(map(len, str(fault).splitlines())) < 5000
    if name in REFUSED:
        assert {each.code for each in found} == {"E104"}, [each.message for each in found]
    if name in ACCEPTED:
        assert not found, [each.message for each in found]
    assert peak() - before < BYTES


def test_layers_that_take_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "MAX_EFFORT", 100)
    with pytest.raises(SpecError) as caught:
        check.load_text("seqblocks: 1\nmodel: {input: {features: 8}, steps: [repeat: {times: 99, steps: [silu]}]}")
    (fault,) = caught.value.diagnostics
    assert (fault.code, fault.message) == ("E104", "the model's layers take too long to analyse")
    assert (fault.hint, fault.expected) == ("use fewer layers or shorter expressions", None)
