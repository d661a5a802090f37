"""Attacks on the programs by kills, power losses, failing calls, disks, signals and memory limits: what scripts/campaign runs."""
