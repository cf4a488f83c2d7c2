"""Composed configuration: where it lies, how a command reads it, what it builds."""

from agentjax.config.command import CommandLine as CommandLine
from agentjax.config.command import run_command as run_command
from agentjax.config.folders import config_folder as config_folder
