"""`mlcpipe bench`: how fast a model is here."""
