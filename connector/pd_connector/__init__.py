"""What runs inside vLLM: a streaming plugin and a NIXL pull connector.

Importing this package imports nothing of vLLM; the router and the toolkit use
:mod:`pd_connector.contract` without an engine installed.
"""
