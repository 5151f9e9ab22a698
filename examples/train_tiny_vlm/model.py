"""A lean training forward of Qwen2.5-VL: one picture layout per batch, branches that share their
pictures.

The weights carry the published names (`visual.*`, `model.*`) but for q, k, v and gate, up, which
are fused here and split by `published`. `check` proves it equal to transformers' model.
"""

import functools

import torch
import torch.nn.functional as F
from torch import nn

MEAN, STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
CONFIG = {
    "hidden_size": 256,
    "intermediate_size": 448,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 640,
    "rope_theta": 500.0,
    "mrope_section": [4, 6, 22],
    "rms_norm_eps": 1e-6,
    "vision": {
        "depth": 6,
        "hidden_size": 128,
        "num_heads": 4,
        "intermediate_size": 320,
        "out_hidden_size": 256,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "window_size": 112,
        "fullatt_block_indexes": [2, 4, 5],
        "temporal_patch_size": 2,
        "tokens_per_second": 2,
    },
}


def rms_norm(x, weight):
    return F.rms_norm(x, (x.shape[-1],), weight, 1e-6)


def rotate(x, cos, sin):
    a, b = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-b, a), dim=-1) * sin


def additive(mask):
    return torch.zeros(mask.shape).masked_fill_(~mask, -1e9)


@functools.lru_cache(maxsize=512)
def vision_tables(height: int, width: int, head: int, window: int):
    """cos, sin and window mask (None if one window holds all) for a grid of patches in 2x2-block
    order.
    """
    rows = torch.arange(height)[:, None].expand(height, width)
    cols = torch.arange(width)[None, :].expand(height, width)
    rows, cols = (
        t.reshape(height // 2, 2, width // 2, 2).transpose(1, 2).reshape(-1) for t in (rows, cols)
    )
    inverse = 10000.0 ** -(torch.arange(0, head // 2, 2) / (head // 2))
    angles = torch.cat((rows[:, None] * inverse, cols[:, None] * inverse), dim=-1).repeat(1, 2)
    name = rows // window * 10_000 + cols // window
    mask = (
        None if height <= window and width <= window else additive(name[:, None] == name[None, :])
    )
    return angles.cos(), angles.sin(), mask


class Block(nn.Module):
    """One layer of either half; the vision half has biases in its MLP and projection."""

    def __init__(self, width, heads, kv_heads, ffn, vision):
        super().__init__()
        self.heads, self.kv_heads, self.head = heads, kv_heads, width // heads
        self.norm1, self.norm2 = nn.Parameter(torch.ones(width)), nn.Parameter(torch.ones(width))
        self.qkv = nn.Linear(width, (heads + 2 * kv_heads) * self.head)
        self.proj = nn.Linear(width, width, bias=vision)
        self.gate_up = nn.Linear(width, 2 * ffn, bias=vision)
        self.down = nn.Linear(ffn, width, bias=vision)

    def forward(self, x, cos, sin, mask, wanted=None):
        """With `wanted` only those rows (flat indexes) go through the MLP and come out."""
        b, n, _ = x.shape
        q, k, v = (
            self.qkv(rms_norm(x, self.norm1))
            .view(b, n, -1, self.head)
            .split((self.heads, self.kv_heads, self.kv_heads), dim=2)
        )
        q, k, v = (
            rotate(q, cos, sin).transpose(1, 2),
            rotate(k, cos, sin).transpose(1, 2),
            v.transpose(1, 2),
        )
        if self.kv_heads < self.heads:
            k, v = (t.repeat_interleave(self.heads // self.kv_heads, dim=1) for t in (k, v))
        scores = (q * self.head**-0.5) @ k.transpose(
            -1, -2
        )  # faster here than the fused op, whose backward is slow
        if mask is not None:
            scores = scores + mask
        out = scores.softmax(-1) @ v
        x = x + self.proj(out.transpose(1, 2).reshape(b, n, -1))
        if wanted is not None:
            x = x.reshape(b * n, -1)[wanted]
        gate, up = self.gate_up(rms_norm(x, self.norm2)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


class Vision(nn.Module):
    def __init__(self, c):
        super().__init__()
        width, out = c["hidden_size"], c["out_hidden_size"]
        self.c = c
        self.patch_embed = nn.Parameter(torch.randn(width, 3, 2, 14, 14) * 1176**-0.5)
        self.blocks = nn.ModuleList(
            Block(width, c["num_heads"], c["num_heads"], c["intermediate_size"], True)
            for _ in range(c["depth"])
        )
        self.ln_q = nn.Parameter(torch.ones(width))
        self.mlp0, self.mlp2 = nn.Linear(4 * width, 4 * width), nn.Linear(4 * width, out)

    def forward(self, pixels):
        """pixels: uint8 [B, frames (1 for a picture, else even), H, W, 3] -> [B, rows, out], rows
        in the prompt's order.
        """
        b, frames, height, width, _ = pixels.shape
        gh, gw = height // 14, width // 14
        x = pixels.float().mul_(1 / 255).sub_(torch.tensor(MEAN)).div_(torch.tensor(STD))
        t = max(1, frames // 2)
        pair = frames // t
        x = x.view(b * t, pair, gh // 2, 2, 14, gw // 2, 2, 14, 3).permute(
            0, 2, 5, 3, 6, 8, 1, 4, 7
        )
        x = x.reshape(b * t, gh * gw, 3 * pair * 196)
        weight = self.patch_embed if pair == 2 else self.patch_embed.sum(2, keepdim=True)
        x = F.linear(x, weight.reshape(weight.shape[0], -1)).float()
        cos, sin, mask = vision_tables(gh, gw, self.blocks[0].head, self.c["window_size"] // 14)
        cos, sin = cos[:, None], sin[:, None]
        for i, block in enumerate(self.blocks):
            x = block(x, cos, sin, None if i in self.c["fullatt_block_indexes"] else mask)
        x = rms_norm(x, self.ln_q).reshape(b * t, gh * gw // 4, -1)
        return self.mlp2(F.gelu(self.mlp0(x))).float().reshape(b, t * (gh * gw // 4), -1)


class Model(nn.Module):
    def __init__(self, config=CONFIG):
        super().__init__()
        self.config = config
        self.visual = Vision(config["vision"])
        width = config["hidden_size"]
        self.embed = nn.Parameter(torch.randn(config["vocab_size"], width) * 0.06)
        self.layers = nn.ModuleList(
            Block(
                width,
                config["num_attention_heads"],
                config["num_key_value_heads"],
                config["intermediate_size"],
                False,
            )
            for _ in range(config["num_hidden_layers"])
        )
        self.norm = nn.Parameter(torch.ones(width))
        head = width // config["num_attention_heads"]
        inverse = config["rope_theta"] ** -(torch.arange(0, head, 2) / head)
        axis = torch.repeat_interleave(torch.arange(3), torch.tensor(config["mrope_section"]))
        self.register_buffer("inverse", inverse, persistent=False)
        self.register_buffer("axis", axis, persistent=False)
        layers = config["num_hidden_layers"], config["vision"]["depth"]
        for blocks, depth in ((self.layers, layers[0]), (self.visual.blocks, layers[1])):
            for block in blocks:
                for name, scale in (
                    ("qkv", 1.0),
                    ("proj", (2 * depth) ** -0.5),
                    ("gate_up", 1.0),
                    ("down", (2 * depth) ** -0.5),
                ):
                    linear = getattr(block, name)
                    nn.init.normal_(linear.weight, std=scale * linear.weight.shape[1] ** -0.5)
                    if linear.bias is not None:
                        nn.init.zeros_(linear.bias)
        for linear, scale in ((self.visual.mlp0, 1.0), (self.visual.mlp2, 0.2)):
            nn.init.normal_(linear.weight, std=scale * linear.weight.shape[1] ** -0.5)
            nn.init.zeros_(linear.bias)

    def see(self, pictures):
        """Rows of all pictures of each sample, in the prompt's order; equal sizes run as one
        batch.
        """
        if len(pictures) == 2 and pictures[0].shape == pictures[1].shape:
            rows = self.visual(torch.cat(pictures))
            return torch.cat(rows.chunk(2), dim=1)
        return torch.cat([self.visual(p) for p in pictures], dim=1)

    def forward(self, ids, positions, mask, rows, rows_at, wanted):
        """ids [B,T]; positions [3,B,T]; mask bool [B,1,T,T]; rows [B,M,D]; rows_at: flat index of
        each row in B*T; wanted: flat indexes whose logits are returned. Returns these, and what
        comes out of each layer but the last."""
        x = F.embedding(ids, self.embed)
        x = (
            x.reshape(-1, x.shape[-1])
            .index_copy(0, rows_at, rows.reshape(-1, rows.shape[-1]).to(x.dtype))
            .view(x.shape)
        )
        angles = positions[self.axis].permute(1, 2, 0) * self.inverse
        angles = torch.cat((angles, angles), dim=-1)[:, :, None]
        cos, sin, added = angles.cos(), angles.sin(), additive(mask)
        hidden = []
        for block in self.layers[:-1]:
            x = block(x, cos, sin, added)
            hidden.append(x)
        x = self.layers[-1](x, cos, sin, added, wanted)
        return F.linear(rms_norm(x, self.norm), self.embed).float(), hidden


def published(model: Model) -> dict[str, torch.Tensor]:
    """Weights under the names of the published files, float32."""
    out = {
        "model.embed_tokens.weight": model.embed,
        "model.norm.weight": model.norm,
        "visual.patch_embed.proj.weight": model.visual.patch_embed,
        "visual.merger.ln_q.weight": model.visual.ln_q,
        "visual.merger.mlp.0.weight": model.visual.mlp0.weight,
        "visual.merger.mlp.0.bias": model.visual.mlp0.bias,
        "visual.merger.mlp.2.weight": model.visual.mlp2.weight,
        "visual.merger.mlp.2.bias": model.visual.mlp2.bias,
    }
    for i, block in enumerate(model.layers):
        p = f"model.layers.{i}."
        split = [n * block.head for n in (block.heads, block.kv_heads, block.kv_heads)]
        for kind in ("weight", "bias"):
            for name, part in zip("qkv", getattr(block.qkv, kind).split(split), strict=True):
                out[f"{p}self_attn.{name}_proj.{kind}"] = part
        out[p + "self_attn.o_proj.weight"] = block.proj.weight
        out[p + "mlp.gate_proj.weight"], out[p + "mlp.up_proj.weight"] = block.gate_up.weight.chunk(
            2
        )
        out[p + "mlp.down_proj.weight"] = block.down.weight
        out[p + "input_layernorm.weight"], out[p + "post_attention_layernorm.weight"] = (
            block.norm1,
            block.norm2,
        )
    for i, block in enumerate(model.visual.blocks):
        p = f"visual.blocks.{i}."
        out[p + "norm1.weight"], out[p + "norm2.weight"] = block.norm1, block.norm2
        for kind in ("weight", "bias"):
            out[f"{p}attn.qkv.{kind}"], out[f"{p}attn.proj.{kind}"] = (
                getattr(block.qkv, kind),
                getattr(block.proj, kind),
            )
            out[f"{p}mlp.gate_proj.{kind}"], out[f"{p}mlp.up_proj.{kind}"] = getattr(
                block.gate_up, kind
            ).chunk(2)
            out[f"{p}mlp.down_proj.{kind}"] = getattr(block.down, kind)
    return {k: v.detach().float().contiguous() for k, v in out.items()}


def from_published(tensors: dict[str, torch.Tensor], config=CONFIG) -> Model:
    """The lean model with the weights of a published file (any dtype), in float32."""
    model = Model(config)
    for part in published(model):  # names only; the fused ones are put together below
        assert part in tensors, f"{part} is missing from the file"
    t = {k: v.float() for k, v in tensors.items()}

    def fill(parameter, *names):
        parameter.data.copy_(torch.cat([t[n] for n in names]) if len(names) > 1 else t[names[0]])

    fill(model.embed, "model.embed_tokens.weight")
    fill(model.norm, "model.norm.weight")
    fill(model.visual.patch_embed, "visual.patch_embed.proj.weight")
    fill(model.visual.ln_q, "visual.merger.ln_q.weight")
    for kind in ("weight", "bias"):
        fill(getattr(model.visual.mlp0, kind), f"visual.merger.mlp.0.{kind}")
        fill(getattr(model.visual.mlp2, kind), f"visual.merger.mlp.2.{kind}")
    for i, block in enumerate(model.layers):
        p = f"model.layers.{i}."
        for kind in ("weight", "bias"):
            fill(getattr(block.qkv, kind), *(f"{p}self_attn.{n}_proj.{kind}" for n in "qkv"))
        fill(block.proj.weight, p + "self_attn.o_proj.weight")
        fill(block.gate_up.weight, p + "mlp.gate_proj.weight", p + "mlp.up_proj.weight")
        fill(block.down.weight, p + "mlp.down_proj.weight")
        fill(block.norm1, p + "input_layernorm.weight")
        fill(block.norm2, p + "post_attention_layernorm.weight")
    for i, block in enumerate(model.visual.blocks):
        p = f"visual.blocks.{i}."
        fill(block.norm1, p + "norm1.weight")
        fill(block.norm2, p + "norm2.weight")
        for kind in ("weight", "bias"):
            fill(getattr(block.qkv, kind), f"{p}attn.qkv.{kind}")
            fill(getattr(block.proj, kind), f"{p}attn.proj.{kind}")
            fill(getattr(block.gate_up, kind), f"{p}mlp.gate_proj.{kind}", f"{p}mlp.up_proj.{kind}")
            fill(getattr(block.down, kind), f"{p}mlp.down_proj.{kind}")
    return model
