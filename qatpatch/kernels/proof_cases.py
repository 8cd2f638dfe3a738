"""The inputs that `proof` runs a kernel on: small, seeded, and such that the usual faults cannot hide.

Sizes straddle every tile (32, 64, 128 rows; scale tiles of 128 x 4); blocks and rows of zeros sit beside others; one
tensor is huge, one tiny; scales follow each rule. All inputs are finite, and so are their products.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True)
class LinearCase:
    """One linear layer.

    Attributes:
        rows, out_features, in_features: the product's sizes.
        kind: ``"normal"``, ``"zeros"`` (blocks, rows and channels), ``"empty"`` (all zero), ``"spread"`` (rows over 25
            powers of two, block scales down to zero), ``"huge"`` (1e24, against weights of 1e-21), ``"tiny"``.
        rule: how global scales are chosen.
        global_scale: of the input, where it is fixed.
        bias: whether there is one.
        dtype: of operands and output.
    """

    rows: int
    out_features: int
    in_features: int
    kind: str = "normal"
    rule: str = "pow2"
    global_scale: float | None = None
    bias: bool = False
    dtype: torch.dtype = torch.bfloat16

    @property
    def label(self) -> str:
        """What it is, in a few words."""
        scale = f", input scale {self.global_scale:g}" if self.global_scale else ""
        return (
            f"{self.kind} {self.rows} x {self.in_features} by {self.out_features}, {self.rule}{scale}"
            f"{', bias' if self.bias else ''}, {str(self.dtype).removeprefix('torch.')}"
        )

    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """x (rows, K), weight (N, K) and bias (N) on the CPU."""
        generator = torch.Generator().manual_seed(self.rows * 1009 + self.in_features)
        x = torch.randn(self.rows, self.in_features, generator=generator, dtype=torch.float32)
        weight = torch.randn(self.out_features, self.in_features, generator=generator, dtype=torch.float32) * 0.05
        bias = torch.randn(self.out_features, generator=generator, dtype=torch.float32) if self.bias else None
        if self.kind == "zeros":
            x[:, 16:32], x[::3], weight[1::2, :16], weight[-1] = 0.0, 0.0, 0.0, 0.0
        elif self.kind == "empty":
            x.zero_()
        elif self.kind == "spread":
            x *= torch.exp2(torch.randint(-18, 7, (self.rows, 1), generator=generator).float())
            weight *= torch.exp2(torch.randint(-6, 7, (1, self.in_features), generator=generator).float())
        elif self.kind == "huge":
            x, weight = x * 2.0**80, weight * 2.0**-70
        elif self.kind == "tiny":
            x, weight = x * 2.0**-80, weight * 2.0**66
        return x.to(self.dtype), weight.to(self.dtype), None if bias is None else bias.to(self.dtype)


LINEAR_CASES: tuple[LinearCase, ...] = (
    LinearCase(rows=1, out_features=32, in_features=32),
    LinearCase(rows=129, out_features=64, in_features=288, bias=True),
    LinearCase(rows=200, out_features=160, in_features=96, rule="amax", bias=True),
    LinearCase(rows=5, out_features=96, in_features=160, global_scale=1.0, dtype=torch.float16),
    LinearCase(rows=131, out_features=288, in_features=96, kind="zeros", bias=True),
    LinearCase(rows=33, out_features=32, in_features=64, kind="empty"),
    LinearCase(rows=140, out_features=96, in_features=320, kind="spread"),
    LinearCase(rows=17, out_features=64, in_features=96, kind="huge"),
    LinearCase(rows=17, out_features=64, in_features=96, kind="tiny", rule="amax"),
    LinearCase(rows=7, out_features=24, in_features=40, bias=True),
)


@dataclass(frozen=True, kw_only=True)
class AttentionCase:
    """One attention call, BSHD.

    Attributes:
        batch, queries, keys, heads: its sizes.
        kind: ``"normal"``, ``"zeros"`` (blocks, keys, channels), ``"offset"`` (keys with a mean), ``"sharp"``,
            ``"large"`` (V of hundreds, faint scores), ``"small"`` (V of 1/64).
        masked: with a mask over the keys of each sample.
        scale: softmax scale in units of 1 / sqrt(head_dim).
        dtype: of q, k and v.
    """

    batch: int
    queries: int
    keys: int
    heads: int
    kind: str = "normal"
    masked: bool = False
    scale: float = 1.0
    dtype: torch.dtype = torch.bfloat16

    @property
    def label(self) -> str:
        """What it is, in a few words."""
        return (
            f"{self.kind} {self.queries} queries by {self.keys} keys{', masked' if self.masked else ''}, "
            f"{str(self.dtype).removeprefix('torch.')}"
        )

    @property
    def mild(self) -> bool:
        """Whether any good FP4 attention is near the dense one."""
        return self.kind in ("normal", "zeros", "offset") and min(self.queries, self.keys) > 1

    def tensors(self, head_dim: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """q, k, v (B, S, H, D) and a boolean mask (B, 1, 1, keys) or None, on the CPU."""
        generator = torch.Generator().manual_seed(self.queries * 1009 + self.keys)

        def noise(length: int) -> torch.Tensor:
            return torch.randn(self.batch, length, self.heads, head_dim, generator=generator, dtype=torch.float32)

        q, k, v = noise(self.queries), noise(self.keys), noise(self.keys)
        if self.kind == "zeros":
            q[:, ::3, :, :16], k[:, 1::4], v[:, :16], v[..., 3] = 0.0, 0.0, 0.0, 0.0
        elif self.kind == "offset":
            k += 4.0 * torch.randn(1, 1, self.heads, head_dim, generator=generator, dtype=torch.float32)
        elif self.kind == "sharp":
            q *= 4.0
        elif self.kind == "large":
            q, v = q * 2.0**-6, v * 300.0
        elif self.kind == "small":
            v = v * 2.0**-6
        mask = None
        if self.masked:
            lengths = torch.linspace(self.keys // 2, self.keys, self.batch, dtype=torch.float32).long()
            mask = (torch.arange(self.keys) < lengths[:, None])[:, None, None, :]
        return q.to(self.dtype), k.to(self.dtype), v.to(self.dtype), mask


ATTENTION_CASES: tuple[AttentionCase, ...] = (
    AttentionCase(batch=2, queries=130, keys=200, heads=2),
    AttentionCase(batch=1, queries=300, keys=65, heads=1, dtype=torch.float16),
    AttentionCase(batch=1, queries=1, keys=1, heads=2),
    AttentionCase(batch=1, queries=65, keys=391, heads=1, scale=0.7),
    AttentionCase(batch=2, queries=129, keys=129, heads=1, kind="zeros"),
    AttentionCase(batch=1, queries=127, keys=193, heads=2, kind="offset"),
    AttentionCase(batch=1, queries=64, keys=300, heads=1, kind="sharp"),
    AttentionCase(batch=1, queries=100, keys=255, heads=1, kind="large"),
    AttentionCase(batch=1, queries=100, keys=255, heads=1, kind="small"),
    AttentionCase(batch=2, queries=66, keys=140, heads=1, masked=True),
)
