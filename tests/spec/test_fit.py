"""`seqblocks fit`: against an exhaustive search, against the published sizes, and what it writes."""

from __future__ import annotations

import itertools
import json
import random
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import seqblocks
from seqblocks.architect.facts import measure
from seqblocks.architect.grid import read_demand, read_option
from seqblocks.architect.search import Figures, Point, Search, Target
from seqblocks.language.spec_files import bundled
from tests.sampled import sampled, slow

Run = Callable[..., subprocess.CompletedProcess[str]]

# --- the search, on functions ---------------------------------------------------------------------------------------


def key(targets: list[Target], figures: tuple[float, ...], point: Point) -> tuple[Any, ...]:
    """The order of points by its definition: missed limits, distances, the first figure, the indices."""
    missed = away = 0.0
    for at, kind, value in targets:
        found, scale = figures[at], abs(value) or 1.0
        held = {"<=": found <= value, "<": found < value, ">=": found >= value, ">": found > value}.get(kind, True)
        missed += 0.0 if held else max(abs(found - value) / scale, 5e-324)
        if kind == "=" or (not any(each.kind == "=" for each in targets) and (at, kind, value) == targets[0]):
            away += abs(found - value) / scale
    return (missed > 0, round(missed, 12), round(away, 12), figures[0], point)


def random_problem(rng: random.Random) -> tuple[list[list[int]], Callable[[Point], Figures], list[Target]]:
    """A model's counts in its width and depth, and perhaps a third number, with steps, invalid points and plateaus."""
    values = [
        [64 * (n + 1) for n in range(rng.randint(7, 20))],
        list(range(2, rng.randint(4, 16))),
        [1, 2, 3, 4, 6, 8][: rng.choice([1, 1, 4, 6])],
    ]
    step, table = rng.choice([1, 64, 256]), rng.choice([0, 256, 50257])
    divisor, share, bump = rng.choice([1, 1, 3, 7]), rng.choice([0, 1]), rng.choice([0, 0, 0, 900_000])

    def figures(point: Point) -> Figures:
        dim, depth, heads = (axis[at] for axis, at in zip(values, point, strict=True))
        if dim % heads or dim // 64 % divisor:
            return f"{dim} {heads}"
        hidden = -(-(8 * dim // 3) // step) * step
        params = table * dim + depth * (4 * dim * dim + 3 * dim * hidden + share * dim * dim // heads)
        return (float(params + bump * (depth % 3)), float(depth * dim * 16 // heads))

    anywhere = [each for point in itertools.product(*map(range, map(len, values)))
                if not isinstance(each := figures(point), str)]  # fmt: skip
    aim, other = rng.choice(anywhere), rng.choice(anywhere)
    targets = [Target(0, rng.choice(["=", "=", "=", "<="]), float(round(aim[0] * rng.choice([1, 1, 1.01, 0.8, 9]))))]
    if rng.random() < 0.5:
        targets.append(Target(1, rng.choice(["<=", "<", ">=", "="]), other[1]))
    return values, figures, targets


@pytest.mark.parametrize("seed", range(60))
def test_the_search_finds_the_optimum_of_the_grid(seed: int) -> None:
    values, figures, targets = random_problem(random.Random(seed))
    count = 1 + seed % 3
    checked: list[Point] = []
    search = Search(values, [True] * 3, lambda point: checked.append(point) or figures(point), targets, 0)  # type: ignore[func-returns-value]
    found = search.run(count)
    points = [p for p in itertools.product(*map(range, map(len, values))) if not isinstance(figures(p), str)]
    assert [key(targets, figures(p), p) for p in found] == sorted(key(targets, figures(p), p) for p in points)[:count]  # type: ignore[arg-type]
    assert len(checked) == len(set(checked))
    held = [p for p in points if key([t for t in targets if t.kind != "="] or [Target(0, ">=", 0)], figures(p), p)[0] is False]  # type: ignore[arg-type]  # noqa: E501
    for target in targets:
        if target.kind == "=":
            sides = {(figures(p)[target.at] > target.value) - (figures(p)[target.at] < target.value) for p in held}  # type: ignore[operator]
            assert search.reaches(target) == (0 in sides or sides == {-1, 1})


@pytest.mark.parametrize("sizes", [(64, 47), (300, 24), (1000, 1), (20, 60)])
def test_few_points_are_checked(sizes: tuple[int, int]) -> None:
    values = [[16 * (n + 1) for n in range(sizes[0])], list(range(1, sizes[1] + 1))]

    def figures(point: Point) -> Figures:
        dim, depth = values[0][point[0]], values[1][point[1]]
        return (float(256 * dim + depth * 12 * dim * dim),)

    for target in (1e5, 1e6, 1e7, 1e8, 1e9):
        search = Search(values, [True, True], figures, [Target(0, "=", target)], 0)
        search.run(5)
        assert len(search.known) < (200 if sizes[1] > 1 else 60)


@pytest.mark.parametrize(("dim", "depth"), [(64, 1), (68, 2), (80, 2), (192, 5)])
def test_a_fault_that_narrow_models_share_says_nothing_of_wide_ones(dim: int, depth: int) -> None:
    """With `heads: dim // 64`, all widths below 64 have the same fault, at every depth."""
    values = [list(range(16, 257, 4)), list(range(1, 9))]

    def figures(point: Point) -> Figures:
        width, layers = values[0][point[0]], values[1][point[1]]
        if width < 64:
            return "heads must be at least 1, not 0"
        return (_params(width, layers),) if width % (width // 64) == 0 else f"{width // 64} heads of {width}"

    target = Target(0, "=", _params(dim, depth))
    assert Search(values, [True, True], figures, [target], 0).run() == [((dim - 16) // 4, depth - 1)]


def _params(dim: int, depth: int) -> float:
    return float(256 * dim + 12 * depth * dim * dim)


PLATEAUS: dict[str, tuple[Callable[[int, int], float], list[Target]]] = {
    "only one option matters": (lambda dim, depth: 4.0 * dim, [Target(1, "=", 1024.0)]),
    "between two plateaus": (lambda dim, depth: 64.0 * depth, [Target(1, "=", 1000.0)]),
    "steps in both": (lambda dim, depth: float(dim // 256 * depth // 4), [Target(1, "=", 8.0)]),
    "a limit": (lambda dim, depth: float(dim // 256 * depth // 4), [Target(1, "<=", 8.0)]),
    "constant": (lambda dim, depth: 7.0, [Target(1, "=", 8.0)]),
    "a limit beside a target": (lambda dim, depth: 4.0 * dim, [Target(0, "=", 1e7), Target(1, "<=", 1024.0)]),
    "two targets": (lambda dim, depth: 4.0 * dim, [Target(0, "=", 1e7), Target(1, "=", 1024.0)]),
}


@pytest.mark.parametrize("sizes", [(64, 47), (47, 64)])
@pytest.mark.parametrize("name", PLATEAUS)
def test_few_points_of_plateaus_are_checked(name: str, sizes: tuple[int, int]) -> None:
    other, targets = PLATEAUS[name]
    values = [[16 * (n + 1) for n in range(sizes[0])], list(range(1, sizes[1] + 1))]

    def figures(point: Point) -> tuple[float, float]:
        dim, depth = values[0][point[0]], values[1][point[1]]
        return (_params(dim, depth), other(dim, depth))

    search = Search(values, [True, True], figures, targets, 0)
    found = search.run(3)
    points = itertools.product(*map(range, sizes))
    assert found == sorted(points, key=lambda point: key(targets, figures(point), point))[:3]
    for target in targets:
        search.reaches(target)
    assert len(search.known) < 200


# --- specs ----------------------------------------------------------------------------------------------------------


def random_spec(rng: random.Random) -> tuple[str, dict[str, str], str]:
    """A spec with widths that depend on its options in several ways, a grid, and a target within it."""
    mixers = [
        (
            "- linear: {features: 3 * dim, as: [q, k, v]}\n                "
            "- attention: {q: q, k: k, v: v, heads: heads, window: 16}"
        ),
        "- linear: {features: dim, name: w}\n                - headwise_linear: {block: heads}",
        "- linear: 'round_up(dim, 48)'\n                - silu",
    ]  # fmt: skip
    hidden = rng.choice(["4 * dim", "round_up(8 * dim / 3, 64)", "max(dim, 200)", "dim // heads * heads * 2"])
    text = f"""seqblocks: 1
let: {{dim: 48, heads: 3, depth: 2}}   # to be chosen
model:
  input: {{tokens: {rng.choice([16, 256])}}}
  steps:
    - embed: {{features: dim}}
    - repeat:
        times: depth
        steps:
          - residual:
              steps:
                - layer_norm: {{as: x}}
                {rng.choice(mixers)}
                - linear: {{features: dim, name: out}}
          - residual:
              name: mlp
              steps: [layer_norm, {{linear: "{hidden}"}}, gelu, {{linear: {{features: dim, name: out}}}}]
    - unembed: {{bias: false, tie: embed}}
"""
    solve = {"dim": f"16..{16 * rng.randint(6, 12)}:{rng.choice([8, 16])}"}
    solve |= rng.choice([{}, {"depth": "1..7"}, {"heads": "1..6"}, {"depth": "1..3", "heads": "1,2,4"}])
    return text, solve, f"params={round(10 ** rng.uniform(4, 6)):_}"


@pytest.mark.filterwarnings("ignore::seqblocks.OverrideWarning")  # some specs have no heads
@pytest.mark.parametrize("seed", sampled(range(6), every=3))
def test_random_specs_fit_as_by_exhaustive_search(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    text, solve, target = random_spec(rng)
    (tmp_path / "spec.yaml").write_text(text)
    limits = rng.choice([[], ["state_bytes<=20kB"], ["macs_per_token<90k"]])
    found = seqblocks.fit(tmp_path / "spec.yaml", solve, [target, *limits], top=1)
    options = {path: read_option(path, values).values for path, values in solve.items()}
    best = None
    for values in itertools.product(*options.values()):
        try:
            model = seqblocks.load_text(text, set=dict(zip(options, values, strict=True)))[1]
        except seqblocks.SpecError:
            continue
        params = measure(model, "params")  # type: ignore[arg-type]
        broken = 0.0
        for limit in map(read_demand, limits):
            broken += max(0.0, measure(model, limit.fact) / limit.value - 1)  # type: ignore[arg-type]
        away = abs(params - read_demand(target).value)
        best = min(filter(None, (best, (broken, away, params, values))))
    assert best is not None
    assert (*found.best.values.values(),) == best[3]
    assert found.best.facts["params"] == best[2]
    again = seqblocks.fit(tmp_path / "spec.yaml", solve, [target, *limits], top=1, exhaustive=True)
    assert again.best.values == found.best.values
    assert again.checks == again.points >= found.checks


@pytest.mark.parametrize(
    ("spec", "others"),
    [
        slow(("mamba_130m", ["mamba_370m", "mamba_790m", "mamba_1_4b", "mamba_2_8b"])),
        ("mamba2_370m", ["mamba2_130m", "mamba2_2_7b"]),
        slow(("vil_tiny", ["vil_small", "vil_base"])),
        slow(("vim_small", ["vim_tiny", "vim_base"])),
    ],
)
def test_the_published_sizes_of_a_family_are_recovered(spec: str, others: list[str]) -> None:
    """From one size of a family, its other sizes by their number of parameters alone."""
    for other in others:
        text = bundled()[other].read_text(encoding="utf-8")
        size = {name: int(re.findall(rf"^  {name}: (\d+)", text, re.M)[0]) for name in ("dim", "depth")}
        published = re.findall(r"^  params: ([\d_]+)", text, re.M)[0]
        solve = {"dim": "128..2560:128", "depth": "8..64:8"} if spec.startswith("mamba") else {"dim": "96..960:96"}
        found = seqblocks.fit(spec, solve, f"params={published}", top=1)
        assert found.best.values == {name: size[name] for name in solve}
        assert found.best.deviation == 0
        assert found.checks < 200


# --- the command ----------------------------------------------------------------------------------------------------

SPEC = """\
seqblocks: 1  # a comment
let: {dim: 8,   depth: 2}     # "dim: 8" stays here
blocks:
  own:
    args: {dim: int, heads: 2}
    steps: [{residual: [layer_norm, {linear: {features: dim,}}]}]

model:
  input: {features: dim}
  steps:
    - repeat: {times: depth, steps: [own: {dim: dim}]}   # ünïcode
    - linear: {features: 4}
expect: {params: 212, state_bytes: 0, lookahead: 0}
"""


def test_what_is_written(run_main: Run, tmp_path: Path) -> None:
    """Comments and layout stay; the values, and the numbers of `expect:` that follow from them, change."""
    (tmp_path / "spec.yaml").write_bytes(SPEC.replace("\n", "\r\n").encode())
    command = ["fit", "spec.yaml", "--solve", "dim=8..64:8", "--solve", "depth=2..5", "--to", "params=2k"]
    done = run_main(*command, "--write", "out.yaml", "--format", "json", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    data = json.loads(done.stdout)
    dim, depth, params = *data["best"]["set"].values(), data["best"]["facts"]["params"]
    assert params == depth * (dim * dim + dim + 2 * dim) + 4 * dim + 4
    expected = SPEC.replace("dim: 8,  ", f"dim: {dim},  ").replace("depth: 2}", f"depth: {depth}}}")
    expected = expected.replace("params: 212", f"params: {params}")
    assert (tmp_path / "out.yaml").read_bytes() == expected.replace("\n", "\r\n").encode()
    assert run_main("check", "out.yaml", cwd=tmp_path).returncode == 0
    (tmp_path / "in_place.yaml").write_text(SPEC)
    run_main("fit", "in_place.yaml", *command[2:], "--write", "in_place.yaml", cwd=tmp_path)
    assert (tmp_path / "in_place.yaml").read_text() == expected
    assert sorted(each.name for each in tmp_path.iterdir()) == ["in_place.yaml", "out.yaml", "spec.yaml"]


def test_a_spec_that_was_changed_meanwhile_is_not_overwritten(tmp_path: Path) -> None:
    own, other = tmp_path / "spec.yaml", tmp_path / "out.yaml"
    own.write_text(SPEC)
    found = seqblocks.fit(own, {"dim": "8..64:8"}, "params=2k")
    own.write_text(SPEC + "# mine\n")
    with pytest.raises(seqblocks.UsageError, match=r"spec\.yaml was changed during the fit: it is not overwritten"):
        found.write(own)
    assert own.read_text() == SPEC + "# mine\n"
    found.write(other)
    assert "# mine" not in other.read_text()


def test_what_cannot_be_written(run_main: Run, folder: Path) -> None:
    command = ("fit", "good.yaml", "--solve")
    done = run_main(*command, "model.linear.bias=true,false", "--to", "params=36", "--write", "out.yaml", cwd=folder)
    assert done.returncode == 2
    assert "'model.linear.bias' is not written in the spec" in done.stderr
    done = run_main(*command, "dim=4..8", "--to", "params=36", "--write", "-", cwd=folder)
    assert (done.returncode, done.stdout) == (2, "")
    assert "--write takes the name of a file, not -" in done.stderr
    (folder / "notes.txt").write_text("mine")
    done = run_main(*command, "dim=4..8", "--to", "params=36", "--write", "notes.txt", cwd=folder)
    assert done.returncode == 2
    assert "notes.txt is not a spec, so it is not overwritten" in done.stderr
    assert (folder / "notes.txt").read_text() == "mine"
    failed = (*command, "dim=4..8", "--to", "params=36", "--write", "no/out.yaml")
    done = run_main(*failed, "--format", "json", cwd=folder)  # the result is printed, and the error beside it
    assert json.loads(done.stdout)["candidates"][0]["facts"]["params"] == 36
    assert (done.returncode, done.stderr) == (2, "error: no/out.yaml cannot be written: No such file or directory\n")
    done = run_main(*failed, cwd=folder)
    assert done.returncode == 2
    assert "no/out.yaml cannot be written" in done.stderr
    done = run_main(*command, "dim=4,8", "--to", "params=100", "--write", "out.yaml", cwd=folder)
    assert done.returncode == 1
    assert "out.yaml was not written" in done.stderr
    assert not (folder / "out.yaml").exists()


def test_formats_and_two_targets(run_main: Run, folder: Path) -> None:
    command = ["fit", "good.yaml", "--solve", "dim=1..99", "--solve", "model.linear.features=1..9", "--to=params=100"]
    command += ["--to", "macs_per_token<=96", "--top", "2"]
    done = run_main(*command, cwd=folder)
    assert (done.returncode, done.stderr) == (0, "")
    # (dim + 1) * features = 100 and dim * features <= 96: the smallest dim is 19, of 19 * 5 + 5
    assert done.stdout.splitlines()[2].split()[:4] == ["19", "5", "100", "95"]
    assert done.stdout.splitlines()[-1] == "  --set dim=19 --set model.linear.features=5"
    table = run_main(*command, "--format", "markdown", cwd=folder).stdout.splitlines()
    assert table[0].startswith("| dim | model.linear.features | parameters | MACs/token |")
    assert len(table) == 4
    lines = run_main(*command, "--format", "csv", cwd=folder).stdout.splitlines()
    assert lines[0] == "dim,model.linear.features,params,macs_per_token,state_bytes,state,deviation,missed"
    assert lines[1] == "19,5,100,95.0,0,0,0.0,0.0"


def test_divisibility_is_that_of_the_validator(tmp_path: Path) -> None:
    text = SPEC.replace("{linear: {features: dim,}}", "{headwise_linear: {block: heads}}")
    (tmp_path / "spec.yaml").write_text(text)
    found = seqblocks.fit(tmp_path / "spec.yaml", {"dim": "7..40", "blocks.own.heads": "2..5"}, "params=300", top=9)
    assert found.invalid > 0
    for each in found.candidates:
        assert each.values["dim"] % each.values["blocks.own.heads"] == 0


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        (["--solve", "dim=8..64:8", "--to", "params=100M"], 1, "out of reach: params=100,000,000"),
        (["--solve", "dim=8..64:8", "--to", "params<=10"], 1, "out of reach: params<=10"),
        (["--solve", "dim=8..64:8", "--to", "params=500", "--to", "macs_per_token<=9", "--to", "macs_per_token>=99"], 1,
         "error: out of reach: macs_per_token"),
        (["--solve", "dim=1..9", "--to", "params=1e400"], 2, "a target is written params=125M"),
        (["--solve", "dmi=8..64:8", "--to", "params=100"], 1, "did you mean 'dim'?"),
        (["--solve", "dim=0.5,1.5", "--to", "params=100"], 1, "--set dim=0.5"),
        (["--solve", "dim", "--to", "params=100"], 2, "PATH=VALUES"),
        (["--solve", "dim=9..8", "--to", "params=100"], 2, "FIRST..LAST:STEP"),
        (["--solve", "dim=1..8:0", "--to", "params=100"], 2, "FIRST..LAST:STEP"),
        (["--solve", "dim=1..1e12", "--to", "params=100"], 2, "more than 100,000 values"),
        (["--solve", "dim=8:32:8", "--to", "params=100"], 2, "dim=8:32:8: a range is written FIRST..LAST:STEP"),
        (["--solve", "dim=8...32", "--to", "params=100"], 2, "a range is written FIRST..LAST:STEP"),
        (["--solve", "dim=", "--to", "params=100"], 2, "takes a range or a list"),
        (["--solve", "dim=1", "--solve", "dim=2", "--to", "params=100"], 2, "values twice"),
        (["--solve", "dim=1", "--set", "dim=2", "--to", "params=100"], 2, "cannot be set"),
        (["--solve", "dim=1..9", "--to", "parms=100"], 2, "did you mean 'params'?"),
        (["--solve", "dim=1..9", "--to", "params"], 2, "a target is written params=125M"),
        (["--solve", "dim=1..9", "--to", "params=1Q"], 2, "there is no unit 'Q'"),
        (["--solve", "dim=1..9", "--to", "streams=1"], 2, "there is no figure 'streams'"),
        (["--solve", "dim=1..9"], 2, "--to"),
    ],
)
def test_faults(words: list[str], status: int, message: str, run_main: Run, folder: Path) -> None:
    done = run_main("fit", "good.yaml", *words, cwd=folder)
    assert done.returncode == status, done.stderr
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_without_torch(folder: Path) -> None:
    program = "import sys; from seqblocks.cli.main import main; main(sys.argv[1:]); assert 'torch' not in sys.modules"
    command = [sys.executable, "-c", program, "fit", "good.yaml", "--solve", "dim=1..9", "--to", "params=20"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_demands_and_options() -> None:
    assert read_demand("params = 1.3B").value == 1_300_000_000
    assert read_demand("state_bytes<=2MiB").value == 2 * 2**20
    assert (read_demand("state_bytes<512B").kind, read_demand("state_bytes<512B").value) == ("<", 512)
    assert read_option("x", "64..256:64").values == [64, 128, 192, 256]
    assert read_option("x", "0.5..1:0.25").values == [0.5, 0.75, 1]
    assert read_option("x", "8, 4,4").values == [4, 8]
    assert read_option("x", "[1, 2],gelu,'a,b'").values == ["[1, 2]", "gelu", "'a,b'"]
    assert read_option("x", range(3)).values == [0, 1, 2]
