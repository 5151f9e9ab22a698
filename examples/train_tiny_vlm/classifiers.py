"""Linear classifiers of vision rows and of the language side's hidden states, for training only.
Dropped on export.
"""

import torch
import torch.nn.functional as F
from batches import AUX, PLACED
from facts import NAME_FACTS, NUMBERS, ROW_FACTS

PLACED_WEIGHT = 40.0  # an error of a tenth of the picture weighs 0.4
ROW_LAYER, NAME_LAYER = 1, 2  # whose output is asked for ROW_FACTS, for NAME_FACTS


class Seen(torch.nn.Module):
    """Linear classifiers of a vision row, for training only."""

    def __init__(self, width: int):
        super().__init__()
        self.head = torch.nn.Linear(width, sum(n for _, n, _ in AUX) + PLACED)
        torch.nn.init.normal_(self.head.weight, std=0.02)

    def forward(self, rows, targets):
        """Loss, and by classifier the share of right answers among targets that are not
        "nothing".
        """
        logits = self.head(F.rms_norm(rows, rows.shape[-1:])).float()
        logits = logits.reshape(-1, self.head.out_features)
        *parts, placed = logits.split([*(n for _, n, _ in AUX), PLACED], dim=-1)
        targets = targets.reshape(-1, targets.shape[-1])
        total, right = sum(w for _, _, w in AUX), {}
        where = targets[:, len(AUX) :]
        loss = PLACED_WEIGHT * ((placed - (where - 1) / 1000) ** 2 * (where > 0)).sum()
        loss = loss / (where > 0).sum().clamp(min=1) / total
        for (name, n, share), part, target in zip(AUX, parts, targets.T, strict=False):
            weight = torch.ones(n)
            weight[0] = 0.15
            loss = loss + F.cross_entropy(part, target, weight) * share / total
            some = target > 0
            if some.any():
                right[name] = (part[some].argmax(-1) == target[some]).float().mean().item()
        return loss, right


class Told(torch.nn.Module):
    """Linear classifiers of hidden states of the language side, for training only."""

    def __init__(self, width: int, classes, numbers: int = 0):
        super().__init__()
        self.classes, self.numbers = classes, numbers
        self.head = torch.nn.Linear(width, sum(n for _, n, _ in classes) + numbers)
        torch.nn.init.normal_(self.head.weight, std=0.02)

    def forward(self, states, targets, placed_weight: float):
        """Loss, and by classifier the share of right answers; a target of 0 is not asked."""
        logits = self.head(F.rms_norm(states, states.shape[-1:])).float()
        *parts, placed = logits.split([*(n for _, n, _ in self.classes), self.numbers], dim=-1)
        total, right = sum(w for _, _, w in self.classes), {}
        where = targets[:, len(self.classes) :]
        loss = placed_weight * ((placed - (where - 1) / 1000) ** 2 * (where > 0)).sum()
        loss = loss / (where > 0).sum().clamp(min=1) / total
        for (name, _, share), part, target in zip(self.classes, parts, targets.T, strict=False):
            some = target > 0
            if some.any():
                part, target = part[some], target[some]
                loss = loss + F.cross_entropy(part, target) * share / total
                right["told_" + name] = (part.argmax(-1) == target).float().mean().item()
        if (where > 0).any():
            off = (placed - (where - 1) / 1000).abs()[where > 0]
            right["told_place"] = (off < 0.08).float().mean().item()
        return loss, right


class Classifiers(torch.nn.Module):
    """Everything that is trained beside the model and dropped on export."""

    def __init__(self, width: int):
        super().__init__()
        self.seen = Seen(width)
        self.rows = Told(width, ROW_FACTS)
        self.names = Told(width, NAME_FACTS, NUMBERS)

    def told(self, hidden, batch, placed_weight: float):
        """Loss and shares of right answers of both kinds of facts."""
        loss, right = 0.0, {}
        for told, layer, at, targets in (
            (self.rows, ROW_LAYER, batch.row_facts_at, batch.row_facts),
            (self.names, NAME_LAYER, batch.name_facts_at, batch.name_facts),
        ):
            if len(at):
                states = hidden[layer].reshape(-1, hidden[layer].shape[-1])
                targets = torch.from_numpy(targets)
                part, shares = told(states[torch.from_numpy(at)], targets, placed_weight)
                loss, right = loss + part, right | shares
        return loss, right
