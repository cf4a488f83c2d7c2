"""Iterations to time."""

import numpy as np

from agentjax.performance import BatchShape


def iteration(chunk: int = 0, history: int = 0, decodes: int = 0, context: int = 0) -> BatchShape:
    """A chunk over a history beside decodes that have `context` tokens after the iteration."""
    return BatchShape(
        sequences=np.float64((chunk > 0) + decodes),
        decode_sequences=np.float64(decodes),
        decode_context_tokens=np.float64(decodes * context),
        decode_context_max_tokens=np.float64((decodes > 0) * context),
        prefill_tokens=np.float64(chunk),
        prefill_context_tokens=np.float64((chunk > 0) * history),
        prefill_work_tokens2=np.float64(chunk * (history + chunk / 2)),
    )
