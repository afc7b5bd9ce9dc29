"""Whether a run carries a comparison: what has to hold, checked one by one."""
