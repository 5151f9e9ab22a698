"""Muon: matrices moved by orthogonalised momentum, whatever the size of their gradients."""

import re
from collections import defaultdict

import torch


class Muon:
    """Orthogonalised momentum (Newton-Schulz, 5 steps) on stacks of equal matrices."""

    def __init__(self, net, trained: re.Pattern):
        parts = []
        for name, p in net.named_parameters():
            if p.ndim != 2 or name == "embed" or not trained.match(name):
                continue
            module = net.get_submodule(name.rsplit(".", 2)[0]) if "." in name else None
            if ".qkv." in name:
                h, k, d = module.heads, module.kv_heads, module.head
                cuts = [h * d, k * d, k * d]
            elif ".gate_up." in name:
                cuts = [p.shape[0] // 2] * 2
            else:
                cuts = [p.shape[0]]
            start = 0
            for c in cuts:
                parts.append((p, start, start + c))
                start += c
        stacks = defaultdict(list)
        for part in parts:
            stacks[(part[2] - part[1], part[0].shape[1])].append(part)
        self.stacks = sorted(stacks.items())
        self.momentum = [torch.zeros(len(v), *k) for k, v in self.stacks]
        self.ids = {id(p) for p, _, _ in parts}
        kept_small = re.compile(r"layers\.|visual\.mlp2")  # the language side, and what it gets
        self.decayed = {id(p) for name, p in net.named_parameters() if kept_small.match(name)}
        self.seen = {id(p) for name, p in net.named_parameters() if name.startswith("visual.")}

    def step(self, rate: float, see_rate: float, decay: float, beta: float = 0.95) -> None:
        """Move every matrix.

        Args:
            see_rate: Share of `rate` for the encoder.
            decay: Holds norms down: a step is of fixed length, so it moves little of a matrix that
                has grown.
        """
        for ((rows, cols), parts), m in zip(self.stacks, self.momentum, strict=True):
            g = torch.stack([p.grad[a:b] for p, a, b in parts])
            m.lerp_(g, 1 - beta)
            u = orthogonal(g.lerp_(m, beta))
            for (p, a, b), d in zip(parts, u, strict=True):
                own = p.data[a:b]
                size = (own.norm() / min(rows, cols) ** 0.5).clamp(0.05, 1.0)  # of singular values
                own_rate = rate * (see_rate if id(p) in self.seen else 1.0)
                if id(p) in self.decayed:
                    own.mul_(1 - own_rate * decay)
                own.add_(d * size, alpha=-own_rate * max(1.0, rows / cols) ** 0.5)


def orthogonal(g):
    x = g.bfloat16()
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        a = x @ x.mT
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return (x.mT if tall else x).float()
