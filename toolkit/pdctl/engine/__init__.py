"""One engine of a deployment: what vLLM is started with."""
