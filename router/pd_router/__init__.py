"""The KV-aware router: one turn's way through it is :mod:`pd_router.turn`."""
