"""Faults of machines, networks, disks and clocks, struck on real ranks while they save."""
