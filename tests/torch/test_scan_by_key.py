"""A scan in the order of a key, against the same steps on tokens that were sorted before."""

from __future__ import annotations

import itertools

import pytest
import torch

import seqblocks
from seqblocks.combinators.scan import places_by_key
from seqblocks.errors import RunError
from seqblocks.testing import check_shapes
from tests.draws import draw

SNAKE = "row * columns + (column if row % 2 == 0 else columns - 1 - column)"
WINDOWS = "(row // 2 * columns // 2 + column // 2) * 4 + row % 2 * 2 + column % 2"
DIAGONALS = "(row + column) * (rows + columns) + (row if (row + column) % 2 == 0 else column)"
HILBERT = "hilbert(row, column, max(rows, columns))"
PLACES = {
    HILBERT: [0, 1, 5, 4, 8, 12, 13, 9, 10, 14, 15, 11, 7, 6, 2, 3],
    SNAKE: [0, 1, 2, 3, 7, 6, 5, 4, 8, 9, 10, 11, 15, 14, 13, 12],
    WINDOWS: [0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15],
    DIAGONALS: [0, 4, 1, 2, 5, 8, 12, 9, 6, 3, 7, 10, 13, 14, 11, 15],
}


def built(steps: str, input: str = "{features: 3, grid: [4, 4]}") -> seqblocks.SequenceModel:
    text = f"seqblocks: 1\nmodel: {{input: {input}, steps: {steps}}}\n"
    return seqblocks.build_text(text, dtype=torch.float64)


@pytest.mark.parametrize("key", PLACES)
@pytest.mark.parametrize("order", ["sorted", "sorted_reverse"])
def test_tokens_are_read_in_the_order_of_the_key(key: str, order: str) -> None:
    places = PLACES[key]
    steps = "[{causal_conv: {kernel: 3, as: u}}, {ssm: {x: u, dt: u, state: 2}}, {linear: 4}]"
    model = built(f"[{{scan: {{order: {order}, key: '{key}', steps: {steps}}}}}]")
    alone = built(steps, "{features: 3}")
    alone.load_state_dict({name.removeprefix("scan."): value for name, value in model.state_dict().items()})
    places = places if order == "sorted" else places[::-1]
    x = draw(2, 16, 3).requires_grad_()
    found, expected = model(x), torch.zeros(2, 16, 4, dtype=torch.float64)
    expected = expected.index_copy(1, torch.tensor(places), alone(x[:, places]))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    (one,), (other,) = (torch.autograd.grad(y.square().sum(), x) for y in (found, expected))
    torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("side", [1, 2, 8, 32])
def test_neighbours_along_hilberts_curve_are_neighbours_in_the_image(side: int) -> None:
    places = places_by_key(HILBERT, (side, side))
    assert sorted(places) == [*range(side * side)]
    steps = [abs(b // side - a // side) + abs(b % side - a % side) for a, b in itertools.pairwise(places)]
    assert steps == [1] * (side * side - 1)


def test_several_orders_own_parameters_and_images_have_other_sizes() -> None:
    scan = "{scan: {order: [rows, sorted, sorted_reverse], own: all, merge: concat, steps: [causal_conv], key: "
    scan += f"'{SNAKE}'}}}}"
    model = built(f"[{{patch_embed: {{patch: 2, features: 3}}}}, {scan}]", "{image: {size: 8, channels: 1}}")
    assert {name.split(".")[1] for name in model.state_dict() if "scan" in name} == {"rows", "sorted", "sorted_reverse"}
    check_shapes(model)
    image = draw(1, 1, 4, 6)  # 2 rows, 3 columns
    tokens = model.patch_embed(image)
    places = [0, 1, 2, 5, 4, 3]
    own = model.scan.sorted
    expected = torch.zeros_like(tokens).index_copy(1, torch.tensor(places), own(tokens[:, places]))
    torch.testing.assert_close(model(image)[..., 3:6], expected, rtol=1e-12, atol=1e-12)


def test_it_does_not_stream_and_a_key_has_a_number_for_each_token() -> None:
    model = built("[{scan: {order: sorted, key: column, steps: [causal_conv]}}]")
    with pytest.raises(RunError, match="it reads the sequence in the order sorted"):
        model.init_state(1)
    divides = built(
        "[{patch_embed: {patch: 1, features: 2}}, {scan: {order: sorted, key: 1 / (row - 5), steps: [causal_conv]}}]",
        "{image: {size: 4, channels: 1}}",
    )
    with pytest.raises(RunError, match=r"the key .* of 6 rows and 1 columns: "):
        divides(draw(1, 1, 6, 1))
