"""Decoding rules: candidates, quotas, stopping. Sees logits and tokens only."""

from herald.decode.canvas import BlockState
from herald.decode.detokenize import IncrementalDecoder
from herald.decode.entropy_bound import NoiseRules, NoiseStep, advance
from herald.decode.noise import Noise, uniform_noise
from herald.decode.policy import (
    CanvasPlan,
    CanvasPolicy,
    DecodePolicy,
    NoisePolicy,
    Policy,
    policy_for,
    policy_of,
)
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
    "Noise",
    "NoisePolicy",
    "NoiseRules",
    "NoiseStep",
    "Policy",
    "StopChecker",
    "Take",
    "advance",
    "candidates",
    "draw",
    "policy_for",
    "policy_of",
    "quota",
    "request_generator",
    "taken",
    "uniform_noise",
]
