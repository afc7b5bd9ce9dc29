"""Grafana dashboards and alert rules as `pdctl dashboards build` wrote them."""
