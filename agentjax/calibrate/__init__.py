"""Fitting a performance model to what a client recorded of a server."""

from agentjax.calibrate.fit import Fit as Fit
from agentjax.calibrate.fit import fit as fit
from agentjax.calibrate.identify import Identification as Identification
from agentjax.calibrate.identify import identify as identify
from agentjax.calibrate.observations import Observations as Observations
from agentjax.calibrate.observe import observe as observe
