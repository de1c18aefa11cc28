"""`mlcpipe bench`: measures a model's speed on this machine."""
