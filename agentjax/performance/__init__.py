"""How long an iteration takes."""

from agentjax.performance.affine import Affine as Affine
from agentjax.performance.base import AbstractPerformance as AbstractPerformance
from agentjax.performance.base import BatchShape as BatchShape
from agentjax.performance.base import decode_batch as decode_batch
from agentjax.performance.build import build_performance as build_performance
from agentjax.performance.hardware import Device as Device
from agentjax.performance.hardware import read_device as read_device
from agentjax.performance.load import load as load
from agentjax.performance.model import ModelSpec as ModelSpec
from agentjax.performance.model import read_config as read_config
from agentjax.performance.piecewise import Piecewise as Piecewise
from agentjax.performance.roofline import Roofline as Roofline
from agentjax.performance.roofline import kv_blocks as kv_blocks
from agentjax.performance.tables import Table as Table
from agentjax.performance.tables import load_table as load_table
