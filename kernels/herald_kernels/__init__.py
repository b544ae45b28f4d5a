"""The operations of HERALD's forward: each with a torch reference, a Triton kernel and one dispatch point.

Words and layouts are those of the design: a *row* is one token's K then V in one KV head (``2 * head_dim``
values), a *lane* is the B positions of one block in a forward. The package never imports ``herald``, and it
imports without Triton.
"""

from herald_kernels.dispatch import OPS, Backend, backend
from herald_kernels.ops.commit import commit
from herald_kernels.ops.commit_edits import commit_edits
from herald_kernels.ops.copy_rows import copy_rows
from herald_kernels.ops.entropy_softmax import entropy_softmax
from herald_kernels.ops.expert_mlp import expert_mlp
from herald_kernels.ops.gelu_mul import gelu_mul
from herald_kernels.ops.greedy_confidence import greedy_confidence
from herald_kernels.ops.open_blocks import open_blocks
from herald_kernels.ops.prefill_attention import prefill_attention
from herald_kernels.ops.qk_norm_rope import qk_norm_rope
from herald_kernels.ops.resident_attention import resident_attention
from herald_kernels.ops.rms_norm import rms_norm
from herald_kernels.ops.route_experts import route_experts
from herald_kernels.ops.score_codes import score_codes
from herald_kernels.ops.score_rows import score_rows
from herald_kernels.ops.silu_mul import silu_mul

__all__ = [
    "OPS",
    "Backend",
    "backend",
    "commit",
    "commit_edits",
    "copy_rows",
    "entropy_softmax",
    "expert_mlp",
    "gelu_mul",
    "greedy_confidence",
    "open_blocks",
    "prefill_attention",
    "qk_norm_rope",
    "resident_attention",
    "rms_norm",
    "route_experts",
    "score_codes",
    "score_rows",
    "silu_mul",
]
