"""Cheaper ways to rank rows than every key: page bounds, page means, part of the dimensions. Own queries.

Each gives scores [H, R] of the candidates of a span; keys are those of the prefix, [H, s, D].
"""

from __future__ import annotations

import torch

from bench_longctx.real_keys.mass import Operator, QuerySet, Span, reduce

PAGE = 16
PARTIAL = 0.3


def _pages(keys: torch.Tensor, page: int) -> torch.Tensor:
    """[H, s, D] -> [H, pages, page, D]; an unfinished last page lies in the recent window and is left out."""
    return keys[:, : keys.shape[1] // page * page].unflatten(1, (-1, page))


def _of_rows(scores: torch.Tensor, span: Span, page: int) -> torch.Tensor:
    """Scores of pages [H, pages] -> of the candidates; a set that ends inside a page takes its first rows."""
    return span.candidates(scores.repeat_interleave(page, -1))


def page_bounds(
    block: QuerySet, keys: torch.Tensor, span: Span, scale: float, operator: Operator, page: int = PAGE
) -> torch.Tensor:
    """The largest score any key within the page's per-dimension bounds could get (Quest, arXiv 2406.10774,
    section 3.2), for each query, then the operator over queries and heads.
    """
    pages = _pages(keys, page)
    high, low = pages.amax(2), pages.amin(2)
    bound = torch.einsum("hngd,hpd->hngp", block.values.clamp(min=0), high)
    bound += torch.einsum("hngd,hpd->hngp", block.values.clamp(max=0), low)
    return _of_rows(reduce(bound * scale - block.lse[..., None], operator), span, page)


def page_means(
    block: QuerySet, keys: torch.Tensor, span: Span, scale: float, operator: Operator, page: int = PAGE
) -> torch.Tensor:
    """The score of the page's mean key."""
    means = _pages(keys, page).mean(2)
    return _of_rows(reduce(block.log_weights(means, scale), operator), span, page)


def partial_keys(
    block: QuerySet,
    keys: torch.Tensor,
    span: Span,
    scale: float,
    operator: Operator,
    sample: torch.Tensor,
    share: float = PARTIAL,
) -> torch.Tensor:
    """Scores from a share of the dimensions, after InfiniGen (arXiv 2406.19707, sections 4.2 and 4.3).

    Queries and keys are turned by the right singular vectors of a sample of queries [H, n, G, D] taken
    beforehand, so that few dimensions carry most; the dimensions with the largest sum of magnitudes over
    sample and keys stay. (InfiniGen turns before the rotary embedding, and asks with the queries that the
    layer before predicts; here the turn comes after it and the queries are the block's own.) Each query is
    normalised over the partial scores of the candidates.
    """
    asked = sample.flatten(1, 2)
    turn = torch.linalg.eigh(asked.mT @ asked).eigenvectors  # [H, D, D], the singular vectors as columns
    rows = torch.einsum("hrd,hde->hre", keys[:, span.first : span.last], turn)
    seen = torch.einsum("hngd,hde->hnge", sample, turn).abs().mean((1, 2)) + rows.abs().mean(1)
    kept = seen.topk(max(1, round(share * keys.shape[2])), dim=-1).indices
    basis = turn.gather(2, kept[:, None].expand(-1, turn.shape[1], -1))  # [H, D, kept]
    queries = torch.einsum("hngd,hde->hnge", block.values, basis)
    rows = rows.gather(2, kept[:, None].expand(-1, rows.shape[1], -1))
    scores = torch.einsum("hnge,hre->hngr", queries, rows) * scale
    return reduce(scores - scores.logsumexp(-1, keepdim=True), operator)
