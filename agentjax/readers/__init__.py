"""Files of benchmark clients, read as recordings."""

from agentjax.readers.read import read_recording as read_recording
