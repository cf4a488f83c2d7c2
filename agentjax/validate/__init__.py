"""Simulated against measured: the requests of a measured run are served again by the simulator, with the
run's engine settings, and every service metric of both is compared."""

from agentjax.validate.compare import Error as Error
from agentjax.validate.compare import Timeline as Timeline
from agentjax.validate.compare import errors as errors
from agentjax.validate.in_step import in_step as in_step
from agentjax.validate.measured import Measured as Measured
from agentjax.validate.measured import read_measured as read_measured
from agentjax.validate.replay import Replay as Replay
from agentjax.validate.replay import replay as replay
from agentjax.validate.run import Validation as Validation
from agentjax.validate.run import fit_overhead as fit_overhead
from agentjax.validate.run import measured_cluster as measured_cluster
from agentjax.validate.run import validate as validate
