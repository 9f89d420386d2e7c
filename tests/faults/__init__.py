"""Try to break a run of the command: kill it, fill its disk, damage its files; `make faults` prints the table."""
