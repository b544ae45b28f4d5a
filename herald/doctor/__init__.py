"""What this machine offers HERALD, what is missing, and which context lengths fit.

Each probe looks at one thing and returns a `Finding`; `examine` runs them all.
"""

from herald.doctor.examine import examine
from herald.doctor.finding import Finding

__all__ = ["Finding", "examine"]
