"""Tests of agentjax."""
