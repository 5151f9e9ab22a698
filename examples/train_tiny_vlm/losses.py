"""What a batch costs: answers, and what the classifiers of training say beside them."""

import batches
import kinds
import torch
import torch.nn.functional as F
from batches import SKILL_NAMES


def net_logits(net, batch):
    """Logits of the positions before each label, the vision rows, and hidden states by layer."""
    t = torch.from_numpy
    branch = t(batch.branch)
    length = branch.shape[1]
    mask = (branch[:, None, :] == branch[:, :, None]) | (branch == 0)[:, None, :]
    mask &= torch.ones(length, length, dtype=torch.bool).tril()
    rows = net.see([t(p) for p in batch.pictures])
    logits, hidden = net(
        t(batch.ids), t(batch.positions), mask[:, None], rows, t(batch.rows_at), t(batch.wanted)
    )
    return logits, rows, hidden


def forward_loss(net, aux, batch, recipe, seeing: bool):
    """Loss of one batch, for each answer whether greedy decoding would give it exactly, and what
    classifiers get right.
    """
    t = torch.from_numpy
    logits, rows, hidden = net_logits(net, batch)
    labels, answer = t(batch.labels), t(batch.answer)
    each = F.cross_entropy(logits, labels, reduction="none")
    wrong = torch.zeros(len(batch.skills), dtype=torch.long).index_add_(
        0, answer, (logits.argmax(-1) != labels).long()
    )
    # half by token, half by answer, so that short answers (counts, sides) count like long ones
    sizes = torch.bincount(answer, minlength=len(batch.skills)).float()
    loss = 0.5 * each.mean() + 0.5 * (each / sizes[answer]).sum() / len(batch.skills)
    told, right = aux.told(hidden, batch, recipe["placed"])
    loss = loss + recipe["facts"] * told
    if seeing:
        extra, seen = aux.seen(rows, t(batch.aux))
        loss, right = loss + recipe["aux"] * extra, right | seen
    return loss, (wrong == 0).tolist(), right


def talk_loss(net, aux, encoder, rng, recipe, tally, errors):
    """Loss and size of one batch of conversations, with some pages that keep reading dense.

    Args:
        tally: What was right goes there, by skill, classifier and kind of question.
        errors: Share of wrong answers of late by kind of question, which follows what the batch got
            wrong.
    """
    batch = batches.train_batch(rng, encoder, recipe, errors)
    seeing = recipe["phase"] != "talks"
    loss, exact, right = forward_loss(net, aux, batch, recipe, seeing)
    tally["loss"].append(loss.item())
    for skill, kind, ok in zip(batch.skills, batch.kinds, exact, strict=True):
        tally["skill " + SKILL_NAMES[skill]].append(ok)
        tally["kind " + kinds.NAMES[kind].replace(": ", "/").replace(" ", "_")].append(ok)
        errors[kind] += 0.02 * (float(not ok) - errors[kind])
    for name, value in right.items():
        tally["aux " + name].append(value)
    if seeing and recipe["pages"]:
        loss = loss + recipe["aux"] * page_loss(net, aux, rng, recipe, tally)[0]
    return loss, len(batch.ids)


def page_loss(net, aux, rng, recipe, tally):
    """Loss and size of one batch of pages, for the encoder alone."""
    pixels, targets = map(
        torch.from_numpy,
        batches.page_batch(rng, recipe["pages"], min(recipe["largest"], 224 * 224)),
    )
    loss, right = aux.seen(net.visual(pixels), targets)
    for name, value in right.items():
        if name.startswith("char") or recipe["phase"] == "pages":
            tally["aux page_" + name].append(value)
    return loss, len(pixels)
