"""Steps that reduce or increase the number of tokens, for random specs (compose.py)."""

from __future__ import annotations

from dataclasses import replace

from tests.compose_tokens import Tokens
from tests.composed import FINEST, Body, Kind


class Rates(Tokens):
    """Merge and split tokens."""

    def down(self, body: Body) -> None:
        now = body.now
        factors = [f for f in (2, 3, 4) if not now.length or now.length % f == 0]
        if not factors:
            self.pointwise(body)
            return
        factor = self.chance.choice(factors)
        length = now.length and now.length // factor
        made = replace(now, length=length, rate=now.rate * factor, grid=None)
        self.add(body, "downsample", made, factor=factor, method=self.chance.choice(["mean", "last"]))

    def up(self, body: Body) -> None:
        now = body.now
        if not (factors := self.splits(now)):
            self.pointwise(body)
            return
        factor = self.chance.choice(factors)
        made = replace(now, length=now.length and now.length * factor, rate=now.rate / factor, grid=None)
        self.add(body, "upsample", made, factor=factor)

    def splits(self, now: Kind) -> list[int]:
        """Return into how many tokens each token may be split: often no more than the input has."""
        least = FINEST if self.maybe(0.3) else min(now.rate, 1)
        return [f for f in range(2, 13) if now.rate / f >= least and (now.length or 1) * f < 49]

    def between_rates(self, body: Body) -> None:
        """Append attention from the current tokens to merged ones, or from merged ones to the current ones."""
        now, source = body.now, self.named(body)
        factors = [f for f in (2, 3, 4) if not now.length or now.length % f == 0]
        if not factors or now.rate > 6:
            self.pointwise(body)
            return
        self.down(body)
        coarse, merged = body.now, self.named(body)
        pairs = [(source, now), (merged, coarse)]
        (query, of_query), (key, of_key) = pairs if self.maybe(0.7) else pairs[::-1]
        shared, values = self.chance.randint(1, 2), self.chance.randint(1, 3)
        heads, width = shared * self.chance.randint(1, 2), self.chance.randint(1, 3)
        q, merges = self.project(body, query, of_query, heads * width), self.maybe(0.6)
        results = []
        for name, kind in [(key, of_key), *([(query, of_query)] if merges else [])]:
            self.add(
                body, "attention", replace(of_query, width=heads * (values + merges)),
                q=q, k=self.project(body, name, kind, shared * width),
                v=self.project(body, name, kind, shared * values), heads=heads, kv_heads=shared, cache=100,
                window=self.chance.choice([None, None, 1, 2, 3]), soft_cap=self.chance.choice([None, None, 2]),
                sinks=self.chance.choice([None, True]), logsumexp=merges or None,
                rotary=100 if name == query and width % 2 == 0 else None,
            )  # fmt: skip
            results.append(self.named(body) if merges else "")
        if merges:
            again = self.maybe(0.6)
            names = {"from": results[0], "with": results[1], "heads": heads, "logsumexp": again or None}
            self.add(body, "merge_attention", replace(of_query, width=heads * (values + again)), **names)

    def selected(self, body: Body) -> None:
        """Append attention to keys that each token selects: single ones, or those of blocks."""
        now, source = body.now, self.named(body)
        sizes = [f for f in (1, 2, 3) if not now.length or now.length % f == 0]
        block = self.chance.choice(sizes if now.rate <= 6 else [1])
        shared, values, width = self.chance.randint(1, 2), self.chance.randint(1, 3), self.chance.randint(1, 3)
        heads = shared * self.chance.randint(1, 2)
        k, v = (self.project(body, source, now, shared * each) for each in (width, values))
        index_k, merged = k, now
        if block > 1:
            merged = replace(now, width=shared * width, length=now.length and now.length // block,
                             rate=now.rate * block, grid=None)  # fmt: skip
            self.add(body, "downsample", merged, **{"from": k, "factor": block, "method": "mean"})
            index_k = self.named(body)
        last, top = self.chance.randint(0, 2), self.chance.randint(2, 3)
        weight = self.project(body, source, now, heads) if self.maybe(0.2) else None
        q = self.project(body, source, now, heads * width)
        self.add(
            body, "selected_attention", replace(now, width=heads * values), q=q, k=k, v=v, index_q=q, index_k=index_k,
            weight=weight, heads=heads, kv_heads=shared, block=block if block > 1 or self.maybe(0.3) else None, top=top,
            first=self.chance.choice([None, top - last]), last=last, groups=self.chance.choice([None, 1, shared]),
            activation=self.chance.choice([None, "none"]), cache=100, sinks=self.chance.choice([None, True]),
            soft_cap=self.chance.choice([None, None, 2]),
        )  # fmt: skip
        if weight:  # which learns from nothing else
            y = self.named(body)
            self.add(body, "linear", replace(now, width=heads * values), **{"from": weight, "features": heads * values})
            self.add(body, "add", body.now, **{"with": y})

    def windows(self, body: Body) -> None:
        """Merge tokens into features, or split features into tokens, by a pattern."""
        now = body.now
        factors = [f for f in (2, 3) if not now.length or now.length % f == 0]
        spread = [f for f in self.splits(now) if now.width % f == 0]
        if spread and self.maybe(0.5):
            n = self.chance.choice(spread)
            length = now.length and now.length * n
            made = replace(now, width=now.width // n, length=length, rate=now.rate / n, grid=None)
            self.add(body, "rearrange", made, pattern="tokens (n features) -> (tokens n) features", n=self.number(n))
        elif factors and now.width < 30 and now.rate < 12:
            n, merged = self.chance.choice(factors), self.maybe(0.5)
            made = replace(now, length=now.length and now.length // n, rate=now.rate * n, grid=None)
            if merged:
                made = replace(made, width=n * now.width)
                self.add(body, "rearrange", made, pattern="(seq n) features -> seq (n features)", n=n)
            else:
                by = self.chance.choice(["mean", "sum", "max", "min", "std"])
                self.add(body, "reduce", made, pattern="(seq n) features -> seq features", n=n, by=by)
        else:
            heads = self.divisor(now.width)
            self.add(body, "rearrange", now, pattern="seq (heads d) -> seq (d heads)", heads=heads)

    def merged_patches(self, body: Body) -> None:
        """Merge neighbouring patches of an image into one token."""
        now = body.now
        if now.grid is None or body.columns or now.width > 12:
            self.windows(body)
            return
        rows, columns = now.grid
        p, q = (self.chance.choice([n for n in (1, 2, 3) if size % n == 0]) for size in now.grid)
        grid, rate = (rows // p, columns // q), now.rate * p * q
        made = Kind("sequence", now.width * p * q, grid[0] * grid[1], grid, rate)
        pattern = "(rows p) (columns q) features -> rows columns (p q features)"
        self.add(body, "rearrange", made, pattern=pattern, p=p, q=q)

    def conv1d(self, body: Body) -> None:
        """Append a dense convolution that keeps, reduces or increases the number of tokens."""
        now, width, finer = body.now, self.width(), [s for s in self.splits(body.now) if s < 5]
        groups = self.chance.choice([g for g in range(1, width + 1) if now.width % g == 0 and width % g == 0])
        coarser = [s for s in (2, 3, 4) if now.rate < 12 and (not now.length or now.length % s == 0)]
        arguments = {"features": self.number(width), "groups": groups, "bias": self.maybe(0.5)}
        if not self.streams and self.maybe(0.3):
            arguments["causal"] = False
        if finer and not body.chosen and self.maybe(0.6):
            stride = self.chance.choice(finer)
            length = now.length and now.length * stride
            made = replace(now, width=width, length=length, rate=now.rate / stride, grid=None)
            self.add(body, "conv_transpose1d", made, kernel=self.chance.randint(1, 9), stride=stride, **arguments)
            return
        stride = 1 if body.chosen else self.chance.choice([1, *coarser])
        made = replace(now, width=width)
        if stride > 1:
            made = replace(made, length=now.length and now.length // stride, rate=now.rate * stride, grid=None)
        dilation = self.chance.choice([1, 1, 2, 3])
        kernel = self.chance.randint(1, 6)
        self.add(body, "conv1d", made, kernel=kernel, dilation=dilation, stride=stride, **arguments)
