"""Decoding rules: candidates, quotas, stopping. Sees logits and tokens only."""

from herald.decode.detokenize import IncrementalDecoder
from herald.decode.quota import quota
from herald.decode.sampling import draw, request_generator
from herald.decode.stop import StopChecker

__all__ = ["IncrementalDecoder", "StopChecker", "draw", "quota", "request_generator"]
