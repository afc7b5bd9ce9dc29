"""Load, rows, evidence, report and tuning: what ``pdctl bench``, ``report`` and ``tune`` are."""
