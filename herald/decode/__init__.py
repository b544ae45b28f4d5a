"""Decoding rules: candidates, quotas, stopping. Sees logits and tokens only."""

from herald.decode.canvas import BlockState
from herald.decode.detokenize import IncrementalDecoder
from herald.decode.policy import CanvasPlan, CanvasPolicy, DecodePolicy, Policy, policy_of
from herald.decode.quota import quota
from herald.decode.sampling import draw, request_generator
from herald.decode.stop import StopChecker
from herald.decode.take import Take, candidates, taken

__all__ = [
    "BlockState",
    "CanvasPlan",
    "CanvasPolicy",
    "DecodePolicy",
    "IncrementalDecoder",
    "Policy",
    "StopChecker",
    "Take",
    "candidates",
    "draw",
    "policy_of",
    "quota",
    "request_generator",
    "taken",
]
