"""Decoding rules: candidates, quotas, stopping. Sees logits and tokens only."""

from herald.decode.detokenize import IncrementalDecoder
from herald.decode.policy import DecodePolicy, policy_of
from herald.decode.quota import quota
from herald.decode.sampling import draw, request_generator
from herald.decode.stop import StopChecker

__all__ = [
    "DecodePolicy",
    "IncrementalDecoder",
    "StopChecker",
    "draw",
    "policy_of",
    "quota",
    "request_generator",
]
