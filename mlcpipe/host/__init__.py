"""Facts about this machine: processor, memory, bandwidth, installed packages."""
