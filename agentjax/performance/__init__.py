"""How long an iteration takes."""

from agentjax.performance.affine import Affine as Affine
from agentjax.performance.base import AbstractPerformance as AbstractPerformance
from agentjax.performance.base import BatchShape as BatchShape
from agentjax.performance.base import decode_batch as decode_batch
from agentjax.performance.build import build_performance as build_performance
from agentjax.performance.load import load as load
