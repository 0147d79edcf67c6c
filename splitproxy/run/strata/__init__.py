"""Strata as what `splitproxy up` starts: its run config, the configs of both roles, and the memory they share."""
