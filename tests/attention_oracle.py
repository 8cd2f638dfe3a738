"""QAT attention written again, in numpy, a head at a time, with the running maximum and accumulators of a kernel.

Shares no code with qatpatch: FP4 and E4M3 are rounded by searching tables of all their values, the softmax runs in
float64, and tiles are walked one after the other.
"""

from __future__ import annotations

import numpy as np

E2M1 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
E4M3 = np.array(
    [m / 8 * 2.0**-6 for m in range(8)] + [(1 + m / 8) * 2.0 ** (e - 7) for e in range(1, 16) for m in range(8)][:-1]
)


def nearest(x: np.ndarray, table: np.ndarray) -> np.ndarray:
    """The table value nearest to each non-negative x; the even index on a tie; the last one above the table."""
    above = np.searchsorted(table, x).clip(1, len(table) - 1)
    low, high = x - table[above - 1], table[above] - x
    take_low = (low < high) | ((low == high) & ((above - 1) % 2 == 0))
    return np.where(take_low, table[above - 1], table[above])


def nvfp4(x: np.ndarray) -> np.ndarray:
    """Rows of x to NVFP4 and back, global scale 1: float32 steps in the order that the format fixes."""
    x = x.astype(np.float32)
    out = np.zeros(x.shape)
    for start in range(0, x.shape[-1], 16):
        block = x[..., start : start + 16]
        amax = np.abs(block).max(-1, keepdims=True)
        scale = nearest((amax * np.float32(1 / 6)).astype(np.float64), E4M3).astype(np.float32)
        with np.errstate(divide="ignore"):
            inverse = np.where(scale > 0, np.float32(1) / scale, np.float32(0)).astype(np.float32)
        codes = nearest(np.abs(block * inverse).astype(np.float64), E2M1) * np.sign(block)
        out[..., start : start + 16] = codes * scale
    return out


def p_in_fp4(p: np.ndarray) -> np.ndarray:
    """P (rows, keys) to FP4 in groups of 16 keys: divided by the exact amax / 6, multiplied by its E4M3 rounding."""
    out = np.zeros(p.shape)
    for start in range(0, p.shape[1], 16):
        group = p[:, start : start + 16]
        sixth = group.max(1, keepdims=True) / 6
        scale = nearest(sixth, E4M3)
        out[:, start : start + 16] = nearest(group / np.where(sixth == 0, 1, sixth), E2M1) * scale
    return out


class Head:
    """One batch and head: operands rounded, scores with -inf where a key is invalid."""

    def __init__(self, q, k, v, mask, scheme, scale):
        self.quantized = scheme == "sage3"
        bias = np.zeros((len(q), len(k)))
        valid = np.ones((len(q), len(k)), dtype=bool)
        if mask is not None and mask.dtype == bool:
            valid = mask
        elif mask is not None:
            bias, valid = mask.astype(np.float64), mask > -1000
        seen = valid.any(0)[:, None]
        k, v = np.where(seen, k, 0), np.where(seen, v, 0)
        self.q, self.k = nvfp4(q), nvfp4(k)
        self.v = nvfp4(v.T).T if self.quantized else v.astype(np.float64)
        with np.errstate(invalid="ignore"):
            self.scores = np.where(valid, scale * (self.q @ self.k.T) + np.where(valid, bias, 0), -np.inf)

    def forward(self, tile=64, last_first=True):
        rows, keys = self.scores.shape
        maximum, total = np.full(rows, -np.inf), np.zeros(rows)
        out, out_hp = np.zeros(self.q.shape), np.zeros(self.q.shape)
        starts = list(range(0, keys, tile))
        for start in reversed(starts) if last_first else starts:
            scores = self.scores[:, start : start + tile]
            new = np.maximum(maximum, scores.max(1))
            shift = np.where(new == -np.inf, 0, new)
            alpha, p = np.exp(maximum - shift), np.exp(scores - shift[:, None])
            total = total * alpha + p.sum(1)
            out_hp = out_hp * alpha[:, None] + p @ self.v[start : start + tile]
            rounded = p_in_fp4(p) if self.quantized else p
            out = out * alpha[:, None] + rounded @ self.v[start : start + tile]
            maximum = new
        divisor = np.where(total == 0, 1, total)[:, None]
        return out / divisor, out_hp / divisor, maximum, total

    def backward(self, d_out, scale):
        _, out_hp, maximum, total = self.forward()
        p = np.exp(self.scores - np.where(maximum == -np.inf, 0, maximum)[:, None])
        divisor = np.where(total == 0, 1, total)[:, None]
        rounded = (p_in_fp4(p) if self.quantized else p) / divisor
        d_p = d_out @ self.v.T
        d_s = p / divisor * (d_p - (out_hp * d_out).sum(1, keepdims=True))
        return scale * d_s @ self.k, scale * d_s.T @ self.q, rounded.T @ d_out


def attention(q, k, v, d_out, *, scheme, scale, mask=None, tile=64, last_first=True):
    """All results, by name, of BSHD arrays; mask boolean or additive, 2-D or 4-D, broadcast from (B, H, S_q, S_k)."""
    batch, rows, heads, _ = q.shape
    keys = k.shape[1]
    if mask is not None:
        mask = np.broadcast_to(mask, (batch, heads, rows, keys))
    result = {name: np.zeros(q.shape) for name in ("out", "out_hp", "dq")}
    result |= {name: np.zeros(k.shape) for name in ("dk", "dv")}
    result |= {name: np.zeros((batch, heads, rows)) for name in ("row_max", "row_sum")}
    for b in range(batch):
        for h in range(heads):
            head = Head(q[b, :, h], k[b, :, h], v[b, :, h], None if mask is None else mask[b, h], scheme, scale)
            forward = head.forward(tile, last_first)
            result["out"][b, :, h], result["out_hp"][b, :, h] = forward[:2]
            result["row_max"][b, h], result["row_sum"][b, h] = forward[2:]
            grads = head.backward(d_out[b, :, h], scale)
            result["dq"][b, :, h], result["dk"][b, :, h], result["dv"][b, :, h] = grads
    return result
