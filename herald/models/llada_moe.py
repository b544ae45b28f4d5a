"""LLaDA-MoE: experts with a softmax router whose weights are not renormalised (arXiv:2509.24389)."""

from __future__ import annotations

from herald.models.sdar_moe import SdarMoeModel


class LladaMoeModel(SdarMoeModel):
    """See `BlockModel`. Its tensors have the names of SDAR-MoE's; every position sees every position."""
